"""Checkpoints of random weights for benchmarks/loading.py, of about the same bytes in each format.

bf16 has about the shapes of Llama-3.2-1B, the quantized ones have those of Llama-3.1-8B with a smaller vocabulary:
5 GB are 41 layers of 4 bits, 20 of 8. W4A16 and FP8 are compressed-tensors' (groups of 128; a scale for each output,
inputs by token), fp8_blocks is in blocks of 128 x 128, as DeepSeek's, Q4_1 is GGUF's.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY: Final = 32_000
GROUP: Final = 128
Q4_1_BLOCK: Final = 32
Q4_1_BYTES: Final = 20


@dataclass(frozen=True)
class Sizes:
    """Of a Llama."""

    hidden: int
    inner: int
    kv_rows: int
    heads: int
    kv_heads: int

    @property
    def layer_values(self) -> int:
        """Values of a layer's matrices."""
        return sum(rows * width for rows, width in self.matrices().values())

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Names in a layer, and shapes."""
        hidden = self.hidden
        inner = self.inner
        kv_rows = self.kv_rows
        return {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip


SMALL: Final = Sizes(2048, 8192, 512, 16, 4)
LARGE: Final = Sizes(4096, 14336, 1024, 32, 8)


class Noise:
    """Tensors of random values, the same ones as often as it takes: drawing 5 GB takes a minute."""

    def __init__(self) -> None:
        self._floats = torch.randn(1 << 24, dtype=torch.bfloat16) * 0.02
        self._bytes = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8)

    def floats(self, *shape: int) -> Tensor:
        """Of bfloat16."""
        return _repeated(self._floats, math.prod(shape)).view(shape)

    def bytes(self, *shape: int) -> Tensor:
        """Of any bytes."""
        return _repeated(self._bytes, math.prod(shape)).view(shape)

    def float8(self, *shape: int) -> Tensor:
        """Of float8_e4m3fn."""
        return self.floats(*shape).to(torch.float8_e4m3fn)


def _repeated(values: Tensor, size: int) -> Tensor:
    return values.repeat(-(-size // len(values)))[:size]


def _bf16(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    return {"weight": noise.floats(rows, width)}


def _w4a16(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    return {
        "weight_packed": noise.bytes(rows, width // 2).view(torch.int32),
        "weight_scale": noise.floats(rows, width // GROUP).abs() + 1e-3,
        "weight_shape": torch.tensor([rows, width]),
    }


def _gptq(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    return {
        "qweight": noise.bytes(width // 8, rows * 4).view(torch.int32),
        "qzeros": torch.full((width // GROUP, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": (noise.floats(width // GROUP, rows).abs() + 1e-3).half(),
        "g_idx": (torch.arange(width) // GROUP).int(),
    }


def _w4a16_asym(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    zeros = noise.bytes(rows // 8, width // GROUP * 4).view(torch.int32)
    return {**_w4a16(noise, rows, width), "weight_zero_point": zeros}


def _gptq_asym(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    return {**_gptq(noise, rows, width), "qzeros": noise.bytes(width // GROUP, rows // 2).view(torch.int32)}


def _gptq_ordered(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    return {**_gptq_asym(noise, rows, width), "g_idx": (order // GROUP).int()}


def _gptq_8(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    return {
        **_gptq(noise, rows, width),
        "qweight": noise.bytes(width // 4, rows * 4).view(torch.int32),
        "qzeros": torch.full((width // GROUP, rows // 4), 0x7F7F7F7F, dtype=torch.int32),
    }


def _w4a16_ordered(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    return {**_w4a16(noise, rows, width), "weight_g_idx": _gptq_ordered(noise, 8, width)["g_idx"]}


def _awq(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    return {
        "qweight": noise.bytes(width, rows // 2).view(torch.int32),
        "qzeros": noise.bytes(width // GROUP, rows // 2).view(torch.int32),
        "scales": (noise.floats(width // GROUP, rows).abs() + 1e-3).half(),
    }


def _fp8(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    return {"weight": noise.float8(rows, width), "weight_scale": noise.floats(rows, 1).abs() + 1e-3}


def _fp8_blocks(noise: Noise, rows: int, width: int) -> dict[str, Tensor]:
    scales = noise.floats(rows // GROUP, width // GROUP).float().abs() + 1e-3
    return {"weight": noise.float8(rows, width), "weight_scale_inv": scales}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


_BY_TOKEN: Final = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
_INT4: Final = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
_INT4_ASYM: Final = {**_INT4, "symmetric": False}
_FLOAT8: Final = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_GPTQ_ASYM: Final = {**_GPTQ, "sym": False}
_GPTQ_ORDERED: Final = {**_GPTQ_ASYM, "desc_act": True}
_GPTQ_8: Final = {**_GPTQ, "bits": 8}
_INT4_ORDERED: Final = {**_INT4, "actorder": "group"}
_AWQ: Final = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_BLOCKS: Final = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}


@dataclass(frozen=True)
class Format:
    """How a folder's matrices are stored."""

    sizes: Sizes
    value_bytes: float
    stored: Callable[[Noise, int, int], dict[str, Tensor]]
    quantization: dict[str, Any] | None = None


FOLDERS: Final = {
    "bf16": Format(SMALL, 2, _bf16),
    "w4a16": Format(LARGE, 0.5 + 2 / GROUP, _w4a16, _compressed("pack-quantized", _INT4, None)),
    "w4a16_asym": Format(LARGE, 0.5 + 2.5 / GROUP, _w4a16_asym, _compressed("pack-quantized", _INT4_ASYM, None)),
    "gptq": Format(LARGE, 0.5 + 2 / GROUP, _gptq, _GPTQ),
    "gptq_asym": Format(LARGE, 0.5 + 2.5 / GROUP, _gptq_asym, _GPTQ_ASYM),
    "gptq_ordered": Format(LARGE, 0.5 + 2.5 / GROUP, _gptq_ordered, _GPTQ_ORDERED),
    "gptq_8": Format(LARGE, 1 + 3 / GROUP, _gptq_8, _GPTQ_8),
    "w4a16_ordered": Format(LARGE, 0.5 + 2 / GROUP, _w4a16_ordered, _compressed("pack-quantized", _INT4_ORDERED, None)),
    "awq": Format(LARGE, 0.5 + 2.5 / GROUP, _awq, _AWQ),
    "fp8": Format(LARGE, 1, _fp8, _compressed("float-quantized", _FLOAT8, _BY_TOKEN)),
    "fp8_blocks": Format(LARGE, 1, _fp8_blocks, _BLOCKS),
}
Q4_1: Final = "q4_1"
FORMATS: Final = (*FOLDERS, Q4_1)


def make_checkpoint(folder: Path, num_bytes: int, name: str = "bf16") -> None:
    """Write one of about so many bytes."""
    if name == Q4_1:
        _make_gguf(folder / "model.gguf", num_bytes)
        return
    form = FOLDERS[name]
    sizes = form.sizes
    noise = Noise()
    ends_bytes = 4 * VOCABULARY * sizes.hidden
    num_layers = max(1, int((num_bytes - ends_bytes) / (sizes.layer_values * form.value_bytes)))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner, "num_hidden_layers": num_layers, "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }  # fmt: skip
    if form.quantization:
        config["quantization_config"] = form.quantization
    (folder / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}

    def write(file: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file))

    ends = {f"{end}.weight": noise.floats(VOCABULARY, sizes.hidden) for end in ("model.embed_tokens", "lm_head")}
    write("ends.safetensors", {**ends, "model.norm.weight": noise.floats(sizes.hidden)})
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors = {
            f"{prefix}{norm}.weight": noise.floats(sizes.hidden)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        for matrix, shape in sizes.matrices().items():
            tensors |= {f"{prefix}{matrix}.{kind}": made for kind, made in form.stored(noise, *shape).items()}
        write(f"layer-{layer:03}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


_GGUF_NAMES: Final = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _make_gguf(path: Path, num_bytes: int) -> None:
    """Everything but the norms in Q4_1, as in the file of the default model."""
    sizes = LARGE
    value_bytes = Q4_1_BYTES / Q4_1_BLOCK
    num_layers = max(1, int((num_bytes / value_bytes - 2 * VOCABULARY * sizes.hidden) / sizes.layer_values))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    num_blocks = VOCABULARY * sizes.hidden // Q4_1_BLOCK
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, Q4_1_BYTES), dtype=np.uint8)
    blocks[:, :4] = np.array([0.005, -0.04], dtype=np.float16).view(np.uint8)
    flat = blocks.reshape(-1)

    def add(name: str, rows: int, width: int) -> None:
        row_bytes = width // Q4_1_BLOCK * Q4_1_BYTES
        stored = flat[: rows * row_bytes].reshape(rows, row_bytes)
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType.Q4_1)

    add("token_embd.weight", VOCABULARY, sizes.hidden)
    add("output.weight", VOCABULARY, sizes.hidden)
    ones = np.ones(sizes.hidden, dtype=np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(num_layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for matrix, shape in sizes.matrices().items():
            add(f"blk.{layer}.{_GGUF_NAMES[matrix]}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
