"""The operations of torch_ops.py in plain torch, with the same arguments. Knows no native code."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pagemill.model.kernels import linear_reference, reference
from pagemill.model.kernels.linear import GELU_TANH, SILU
from pagemill.model.kernels.pack_linear import NO_GATE

GATES = {"": NO_GATE, "silu": SILU, "gelu_tanh": GELU_TANH}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., N] -> [..., N]."""
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x + residual, which takes the residual's place."""
    return reference.rms_norm(x, weight, eps, residual)


def gated_activation(x: Tensor, activation: str) -> Tensor:
    """[T, 2 * I] -> [T, I]."""
    return reference.gated(x, activation == "gelu_tanh")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    format: str,
    num_outputs: int,
    num_inputs: int,
    gate: str = "",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[M, K] -> [M, N]; gated: [M, N / 2]."""
    panels = linear_reference.as_panels(weight, format, (num_outputs, num_inputs))
    return linear_reference.linear(x, panels, bias, format, (num_outputs, num_inputs), GATES[gate], out_dtype)


def linear_rows(indices: Tensor, weight: Tensor, format: str, num_outputs: int, num_inputs: int) -> Tensor:
    """[T] -> [T, K]. Raises IndexError."""
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < num_outputs:
        raise IndexError(f"a row is asked for that is not one of {num_outputs}")
    panels = linear_reference.as_panels(weight, format, (num_outputs, num_inputs))
    return linear_reference.dequantized(panels, format, (num_outputs, num_inputs))[indices].bfloat16()


def paged_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor,
    step: Sequence[Tensor],
    scale: float,
    window: int | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """[T, H, D] -> [T, H, D]; key and value are written to their slots first."""
    query_start, seq_lens, block_table, slots = step
    rows = reference.unpacked_cache(kv_cache)
    if key is not None and value is not None:
        block_size = kv_cache.shape[3]
        for half, new in zip(rows, (key, value), strict=True):
            written = reference.quantized_rows(new) if kv_cache.dtype == torch.int8 else new
            half[slots // block_size, :, slots % block_size] = written
        kv_cache.copy_(reference.packed_cache(rows))
    attended = reference.paged_attention(
        query, rows, query_start, seq_lens, block_table, scale, window, soft_cap, chunk_size
    )
    return attended.to(query.dtype)


REFERENCES: Mapping[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "rotate_": reference.rotate_,
    "gated_activation": gated_activation,
    "argmax": reference.argmax,
    "sample": reference.sample,
    "linear": linear,
    "linear_rows": linear_rows,
    "paged_attention": paged_attention,
}
"""Name of the operation, without its namespace -> the same in plain torch."""
