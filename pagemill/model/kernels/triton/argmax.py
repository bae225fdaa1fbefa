"""The first index of the largest of each row, over vocabularies of any size: a scan by parts, then one of the parts.

Deterministic: a value and its index are one 64-bit key, so the order of comparisons does not matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch

_BLOCK = 2048
_PARTS = 128
"""Parts into which a row is split, at most."""


@triton.jit
def ordered(value):
    """float32 -> int32 of the same order; NaN above everything, both zeros equal."""
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def _scan(partial, logits, stride, V, PART: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    best = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    for start in range(0, PART, BLOCK):
        cols = part * PART + start + tl.arange(0, BLOCK)
        value = tl.load(logits + row.to(tl.int64) * stride + cols, cols < V, float("-inf")).to(tl.float32)
        key = (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - cols).to(tl.int64)
        best = tl.maximum(best, tl.where(cols < V, key, -0x8000000000000000))
    tl.store(partial + row * tl.num_programs(1) + part, tl.max(best, 0))


@triton.jit
def _merge(out, partial, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    keys = tl.load(partial + row * num_parts + parts, parts < num_parts, -0x8000000000000000)
    index = 0x7FFFFFFF - (tl.max(keys, 0) & 0xFFFFFFFF)
    tl.store(out + row, index.to(out.dtype.element_ty))


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """[L, V], rows of any stride -> [L] int64, or into `out` [L] of an integer type: the first index of the largest,
    or of a NaN."""
    num_rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    # One row is worth many programs, many rows fewer each.
    wanted = max(1, min(_PARTS, 1024 // num_rows))
    part = max(1, triton.cdiv(triton.cdiv(vocab_size, wanted), _BLOCK)) * _BLOCK
    num_parts = triton.cdiv(vocab_size, part)
    partial = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    _scan[(num_rows, num_parts)](
        partial, logits, logits.stride(0), vocab_size, PART=part, BLOCK=_BLOCK, PDL=launch.dependent(),
        **launch.options(8),
    )  # fmt: skip
    _merge[(num_rows,)](
        out, partial, num_parts, BLOCK=launch.power_of_two(num_parts), PDL=launch.dependent(), **launch.options(1)
    )
    return out
