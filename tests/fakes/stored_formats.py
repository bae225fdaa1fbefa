"""Tiny checkpoints in the formats of other libraries: a weight goes in, what a checkpoint stores of it and the same
weight dequantized come out. Written from the formats' descriptions, with nothing of what reads them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.compressed_checkpoint import edit_config

Stored = tuple[dict[str, Tensor], Tensor]
"""(what a checkpoint holds of a weight, by kind; the weight dequantized)"""
Quantize = Callable[[Tensor], Stored]
"""How a weight [out, in] is stored."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output lies where in a word, from the lowest bits."""
NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
)  # fmt: skip
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def store(folder: Path, to: Path, config: dict[str, Any], quantize: Quantize, only: str = "") -> tuple[Path, Path]:
    """(stored, dequantized): two copies of a checkpoint, every linear layer but head and routers in the format, of
    those in whose name the pattern `only` is found."""
    packed, plain = (Path(shutil.copytree(folder, to / name)) for name in ("packed", "plain"))
    stored = {}
    dequantized = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if (
            weight.dim() != 2
            or not re.search(only, name)
            or re.search(r"embed_tokens|lm_head|\.mlp\.gate\.|\.router\.", name)
        ):
            stored[name] = dequantized[name] = weight
            continue
        tensors, values = quantize(weight)
        dequantized[name] = values.float().contiguous()
        stored |= {f"{module}.{kind}": tensor.clone().contiguous() for kind, tensor in tensors.items()}
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    edit_config(packed, quantization_config=config)
    return packed, plain


def dense_words(integers: Tensor, bits: int) -> Tensor:
    """[n, count] of 0 and up -> [n, words] int32: one long integer of each row, the first in its lowest bits."""
    if 32 % bits == 0 and integers.shape[1] * bits % 32 == 0:  # many at a time, for weights of real models
        wide = integers.long().reshape(len(integers), -1, 32 // bits)
        return (wide << bits * torch.arange(32 // bits)).sum(-1).to(torch.int32)
    rows = []
    for row in integers.tolist():
        number = sum(int(value) << bits * index for index, value in enumerate(row))
        num_words = -(-len(row) * bits // 32)
        rows.append([number >> 32 * word & 0xFFFFFFFF for word in range(num_words)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def asymmetric(weight: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [out, in] from 0 up, scales and zero points [out, groups]."""
    groups = weight.view(len(weight), -1, size)
    low = groups.amin(-1).clamp(max=0)
    high = groups.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-4).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    integers = (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 2**bits - 1)
    return integers.flatten(1), scales, zeros


def gptq(
    weight: Tensor, bits: int, size: int, *, ordered: bool = False, v2: bool = False, seed: int | None = None
) -> Stored:
    """AutoGPTQ's layout. `ordered`: inputs are dealt out over groups at random, in layers of the same width alike
    unless `seed` differs."""
    width = weight.shape[1]
    generator = torch.Generator().manual_seed(width if seed is None else seed)
    order = torch.randperm(width, generator=generator) if ordered else torch.arange(width)
    integers, scales, zeros = asymmetric(weight[:, order], bits, size)
    zeros = zeros if v2 else zeros.clamp(min=1)
    places = order.argsort()
    groups = (torch.arange(width) // size)[places]
    values = (integers[:, places] - zeros[:, groups]) * scales[:, groups]
    tensors = {
        "qweight": dense_words(integers[:, places], bits).t(),
        "qzeros": dense_words((zeros if v2 else zeros - 1).t(), bits),
        "scales": scales.t().half(),
        "g_idx": groups.to(torch.int32),
    }
    return tensors, values


def awq(weight: Tensor, size: int) -> Stored:
    """AutoAWQ's layout of version gemm."""
    integers, scales, zeros = asymmetric(weight, 4, size)

    def words(by_input: Tensor) -> Tensor:
        return dense_words(by_input.reshape(len(by_input), -1, 8)[..., list(AWQ_ORDER)].flatten(1), 4)

    values = (integers - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)
    return {"qweight": words(integers.t()), "qzeros": words(zeros.t()), "scales": scales.t().half()}, values


def fp8(weight: Tensor, block: tuple[int, int] | None, name: str) -> Stored:
    """8-bit floats, with a scale for each block, or one."""
    rows, columns = block or tuple(weight.shape)
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))
    grid = padded.reshape(len(padded) // rows, rows, padded.shape[1] // columns, columns)
    scales = (grid.abs().amax((1, 3)) / 448).clamp(min=1e-8)
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: len(weight), : weight.shape[1]]
    values = (weight / spread).to(torch.float8_e4m3fn)
    stored = {"weight": values, name: scales if block else scales.reshape(())}
    return stored | ({} if block else {"input_scale": torch.tensor(0.5)}), values.float() * spread


def nvfp4(weight: Tensor) -> Stored:
    """ModelOpt's layout: groups of 16 with 8-bit scales, and one scale of these."""
    groups = weight.reshape(len(weight), -1, 16)
    largest = weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(-1) / 6 / largest).to(torch.float8_e4m3fn)
    steps = (scales.float() * largest).unsqueeze(-1)
    codes = ((groups / steps.clamp(min=1e-12)).unsqueeze(-1) - E2M1).abs().argmin(-1)
    packed = (codes.flatten(1)[:, ::2] | codes.flatten(1)[:, 1::2] << 4).to(torch.uint8)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": largest, "input_scale": torch.tensor(1.0)}
    return tensors, (E2M1[codes] * steps).flatten(1)


def llm_int8(weight: Tensor) -> Stored:
    """bitsandbytes' LLM.int8()."""
    largest = weight.abs().amax(1)
    values = (weight * 127 / largest[:, None]).round().to(torch.int8)
    format_ = torch.tensor(0, dtype=torch.uint8)
    return {"weight": values, "SCB": largest, "weight_format": format_}, values * largest[:, None] / 127


def table_4bit(weight: Tensor, table: Tensor, kind: str, nested: bool) -> Stored:
    """bitsandbytes' blocks of 64 over all rows, whose scales may be indices of a table in blocks of 256."""
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {}
    if nested:
        of_scales = torch.linspace(-1, 1, 256)
        offset = float(absmax.mean())
        grid = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        largest = grid.abs().amax(1)
        codes = (grid / largest[:, None]).unsqueeze(-1).sub(of_scales).abs().argmin(-1).flatten()[: len(absmax)]
        absmax = of_scales[codes] * largest.repeat_interleave(256)[: len(absmax)] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": of_scales}
    indices = (blocks / absmax[:, None]).unsqueeze(-1).sub(table).abs().argmin(-1).flatten()
    tensors |= {
        "weight": (indices[::2] << 4 | indices[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.absmax": codes.to(torch.uint8) if nested else absmax,
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    values = (table[indices] * absmax.repeat_interleave(64))[: weight.numel()]
    return tensors, values.view(weight.shape)


def torchao_rows(weight: Tensor, dtype: torch.dtype) -> Stored:
    """torchao's Int8Tensor and Float8Tensor with a scale per output."""
    top = 127 if dtype is torch.int8 else 448
    scales = weight.abs().amax(1, keepdim=True) / top
    values = (weight / scales).round().to(dtype) if dtype is torch.int8 else (weight / scales).to(dtype)
    tensors = {"_weight_qdata": values, "_weight_scale": scales}
    if dtype is torch.int8:
        tensors["_weight_zero_point"] = torch.zeros(len(weight), 1, dtype=torch.int8)
    return tensors, values.float() * scales


def torchao_pairs(weight: Tensor, size: int) -> Stored:
    """torchao's Int4Tensor: signed integers in pairs, and what is added to their products."""
    integers, scales, zeros = asymmetric(weight, 4, size)
    offsets = (8 - zeros) * scales
    signed = (integers - 8).to(torch.int8).view(torch.uint8) & 15
    tensors = {
        "_weight_qdata": signed[:, ::2] | signed[:, 1::2] << 4,
        "_weight_scale": scales.t(),
        "_weight_zero_point": offsets.t(),
    }
    spread = scales.repeat_interleave(size, 1), offsets.repeat_interleave(size, 1)
    return tensors, (integers - 8) * spread[0] + spread[1]


def mxfp4_experts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [N, in, out] as gpt-oss publishes them: blocks [N, out, in / 32, 16] and scales [N, out, in / 32]."""
    groups = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, 32)
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = ((groups / exponents.exp2().unsqueeze(-1)).unsqueeze(-1) - E2M1).abs().argmin(-1)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8).contiguous(), (exponents + 127).to(torch.uint8).contiguous()


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """What `mxfp4_experts` makes -> [N, in, out] float32."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return (E2M1[codes] * (scales.float() - 127).exp2().unsqueeze(-1)).flatten(2).transpose(1, 2).contiguous()


def store_gpt_oss(folder: Path, to: Path) -> tuple[Path, Path]:
    """(stored, dequantized): two copies of a checkpoint of gpt-oss, its experts as they are published."""
    packed, plain = (Path(shutil.copytree(folder, to / name)) for name in ("packed", "plain"))
    stored = {}
    dequantized = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.dim() != 3:
            stored[name] = dequantized[name] = weight
            continue
        blocks, scales = mxfp4_experts(weight)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dequantized[name] = mxfp4_values(blocks, scales)
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    edit_config(packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return packed, plain


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    """A quantization_config with one type for all layers."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


def gptq_config(bits: int, size: int, **more: Any) -> dict[str, Any]:
    """A quantization_config with zero points."""
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False, **more}


def auto_round(layout: str, **more: Any) -> dict[str, Any]:
    """A quantization_config with zero points. `layout`: auto_gptq or auto_awq."""
    return {"quant_method": "auto-round", "packing_format": f"auto_round:{layout}", "sym": False, **more}


def quark(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    """A quantization_config with one format for all layers. `more`: about the weights."""
    weight = {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": True, "ch_axis": 0} | more
    inputs = {"dtype": dtype, "qscheme": "per_tensor", "is_dynamic": False}
    usual = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": usual, "exclude": ["lm_head"], "layer_quant_config": {}}


def quark_int8(weight: Tensor) -> Stored:
    """A scale per output, and zeros for zero points."""
    tensors, plain = torchao_rows(weight, torch.int8)
    names = {"_weight_qdata": "weight", "_weight_scale": "weight_scale", "_weight_zero_point": "weight_zero_point"}
    return {names[name]: tensor for name, tensor in tensors.items()}, plain


def quark_mxfp4(weight: Tensor) -> Stored:
    """Two 4-bit floats in each byte, and an exponent for each 32 inputs."""
    blocks, scales = mxfp4_experts(weight.t().unsqueeze(0))
    stored = {"weight": blocks[0].flatten(1), "weight_scale": scales[0]}
    return stored, mxfp4_values(blocks, scales)[0].t().contiguous()


def modelopt(algorithm: str) -> dict[str, Any]:
    """A quantization_config."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"]}


FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "gptq-2": (gptq_config(2, 32), lambda weight: gptq(weight, 2, 32)),
    "gptq-3": (gptq_config(3, 32), lambda weight: gptq(weight, 3, 32)),
    "gptq-4": (gptq_config(4, 64), lambda weight: gptq(weight, 4, 64)),
    "gptq-4-ordered": (gptq_config(4, 32, desc_act=True), lambda weight: gptq(weight, 4, 32, ordered=True)),
    "gptq-8": (gptq_config(8, 32), lambda weight: gptq(weight, 8, 32)),
    "auto-round-gptq": (auto_round("auto_gptq", bits=4, group_size=64), lambda weight: gptq(weight, 4, 64)),
    "auto-round-awq": (auto_round("auto_awq", bits=4, group_size=64), lambda weight: awq(weight, 64)),
    "gptq-v2": (gptq_config(4, 32, checkpoint_format="gptq_v2"), lambda weight: gptq(weight, 4, 32, v2=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, lambda weight: awq(weight, 64)),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda weight: fp8(weight, None, "weight_scale"),
    ),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        lambda weight: fp8(weight, (128, 128), "weight_scale_inv"),
    ),
    "modelopt-fp8": (modelopt("FP8"), lambda weight: fp8(weight, None, "weight_scale")),
    "modelopt-nvfp4": (modelopt("NVFP4"), nvfp4),
    "quark-fp8": (quark("fp8_e4m3", "per_tensor"), lambda weight: fp8(weight, None, "weight_scale")),
    "quark-int8": (quark("int8", "per_channel"), quark_int8),
    "quark-mxfp4": (quark("fp4", "per_group", group_size=32, scale_format="e8m0"), quark_mxfp4),
    "nf4": (BNB4, lambda weight: table_4bit(weight, NF4, "nf4", False)),
    "nf4-nested": (
        BNB4 | {"bnb_4bit_use_double_quant": True},
        lambda weight: table_4bit(weight, NF4, "nf4", True),
    ),
    "llm-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
    "torchao-int8": (torchao("Int8WeightOnlyConfig"), lambda weight: torchao_rows(weight, torch.int8)),
    "torchao-fp8": (torchao("Float8WeightOnlyConfig"), lambda weight: torchao_rows(weight, torch.float8_e4m3fn)),
    "torchao-int4": (torchao("Int4WeightOnlyConfig", group_size=64), lambda weight: torchao_pairs(weight, 64)),
}
"""Name -> (quantization_config, how a weight is stored)."""
