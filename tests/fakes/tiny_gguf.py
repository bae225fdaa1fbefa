"""A tiny Llama checkpoint as a GGUF file: names, interleaved heads and quantized matrices as converters make them."""

from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.fakes.tiny_checkpoint import COMMON

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(folder: Path, path: Path, kind: str = "Q8_0", family: str = "llama", up: str = "ffn_up") -> Path:
    """The Llama checkpoint of `make_checkpoint`, its matrices quantized. `up`: what the family calls that layer."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(COMMON["max_position_embeddings"])
    writer.add_embedding_length(COMMON["hidden_size"])
    writer.add_block_count(COMMON["num_hidden_layers"])
    writer.add_feed_forward_length(COMMON["intermediate_size"])
    writer.add_head_count(COMMON["num_attention_heads"])
    writer.add_head_count_kv(COMMON["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    for name, values in load_file(folder / "model.safetensors").items():
        quant = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        stored = gguf.quants.quantize(np.ascontiguousarray(_interleaved(name, values)), quant)
        writer.add_tensor(_gguf_name(name).replace("ffn_up", up), stored, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top or name == "lm_head.weight":
        return top.get(name, "output.weight")
    index, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _interleaved(name: str, values: np.ndarray) -> np.ndarray:
    heads = {"q_proj": COMMON["num_attention_heads"], "k_proj": COMMON["num_key_value_heads"]}
    for part, count in heads.items():
        if f".{part}." in name:
            return values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return values
