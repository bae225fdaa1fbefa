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
_MAX_TILES = 4
"""Of _BLOCK elements in a part: loads that a thread has under way at once."""
_MANY = 1024
"""Programs beyond which parts grow."""


@triton.jit
def ordered(value):
    """float32 -> int32 of the same order; NaN above everything, both zeros equal."""
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(key):
    """Whether it is the key of a number that is neither infinite nor NaN."""
    return (key >= -0x7F800000) & (key < 0x7F800000)


@triton.jit
def _tile(places, cols, V, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """float32 of a tile of a part; minus infinity beyond the row."""
    return tl.load(places + TILE * BLOCK, cols < V - TILE * BLOCK, float("-inf")).to(tl.float32)


@triton.jit
def _scan(partial, logits, stride, V, TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Key of the largest of a part of a row, and where it is."""
    row, part = tl.program_id(0), tl.program_id(1)
    cols = part * (TILES * BLOCK) + tl.arange(0, BLOCK)
    places = logits + row.to(tl.int64) * stride + cols
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # The value first, then where it is, from the L1 cache: keys of all elements would take longer to compute than the
    # elements to read.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for tile in tl.static_range(TILES):
        best = tl.maximum(best, _tile(places, cols, V, tile, BLOCK), propagate_nan=tl.PropagateNan.ALL)
    key = tl.max(ordered(best), 0)
    top = value_of(key)
    first = tl.full([BLOCK], TILES, tl.int32)
    if key == 0x7FFFFFFF:
        for tile in tl.static_range(TILES - 1, -1, -1):
            value = _tile(places, cols, V, tile, BLOCK)
            first = tl.where(value != value, tile, first)
    else:
        for tile in tl.static_range(TILES - 1, -1, -1):
            first = tl.where(_tile(places, cols, V, tile, BLOCK) == top, tile, first)
    col = tl.min(tl.where(first < TILES, cols + first * BLOCK, 0x7FFFFFFF), 0)
    tl.store(partial + row * tl.num_programs(1) + part, (key.to(tl.int64) << 32) | (0x7FFFFFFF - col).to(tl.int64))


@triton.jit
def _merge(out, partial, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    keys = tl.load(partial + row * num_parts + parts, parts < num_parts, -0x8000000000000000)
    best = tl.max(keys, 0)
    index = tl.where(is_finite(best >> 32), 0x7FFFFFFF - (best & 0xFFFFFFFF), -1)
    tl.store(out + row, index.to(out.dtype.element_ty))


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """[L, V], rows of any stride -> [L] int64, or into `out` [L] of an integer type: the first index of the largest;
    -1 for a row with a NaN, or whose largest is infinite."""
    num_rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    blocks = triton.cdiv(vocab_size, _BLOCK)
    tiles = min(_MAX_TILES, launch.power_of_two(max(1, num_rows * blocks // _MANY)))
    num_parts = triton.cdiv(blocks, tiles)
    partial = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    launch.on(_scan, (num_rows, num_parts))(
        partial, logits, logits.stride(0), vocab_size, TILES=tiles, BLOCK=_BLOCK, PDL=launch.dependent(),
        **launch.options(8),
    )  # fmt: skip
    launch.on(_merge, (num_rows,))(
        out, partial, num_parts, BLOCK=launch.power_of_two(num_parts), PDL=launch.dependent(), **launch.options(1)
    )
    return out
