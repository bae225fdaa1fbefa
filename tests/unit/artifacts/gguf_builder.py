"""Writes tiny .gguf files with the reference writer."""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

HIDDEN, VOCAB, HEADS, LAYERS = 32, 48, 4, 2


def write_gguf(
    path: Path,
    arch: str = "llama",
    keys: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: Mapping[str, np.ndarray] | None = None,
    shape_keys: bool = True,
    embedding: bool = True,
) -> Path:
    """A header that describes a two-layer model, plus what `keys` adds, plus tensors."""
    writer = gguf.GGUFWriter(path, arch)
    if shape_keys:
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(64)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
    keys(writer)
    if embedding:
        writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float16))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
