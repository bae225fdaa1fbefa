"""Sampling from rows of which many logits may be kept (see sampling.py): from a sample of the row a bracket that the
least kept logit lies in; in one pass over the row what is above it, and a list of what is in it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton.argmax import is_finite, ordered, value_of
from pagemill.model.kernels.triton.sampling_rows import (
    HIGHEST_KEY,
    LOWEST_KEY,
    NEAR_BITS,
    floor_key,
    largest_key,
    load_logits,
    load_row,
    sampled,
)

_STEP = tl.constexpr(1 << (32 - NEAR_BITS.value))
"""Between keys that differ in their NEAR_BITS leading bits."""
_DEVIATIONS = tl.constexpr(4.5)
"""How far from a sample's sums those of the row are taken to be: more only in some of a million rows."""


@triton.jit
def load_wide(row, flags, tops, wholes, settings, slots, V, BY_SLOT: tl.constexpr, WORDS: tl.constexpr):
    """(whether a row is wide; its largest logit; its mass; temperature, top-p, min-p, top-k or V; key of the least
    logit that min-p keeps)."""
    _place, temperature, top_p, min_p, limit, _greedy, _filters = load_row(settings, slots, row, V, BY_SLOT, WORDS)
    wide = tl.load(flags + row) > 0
    top = tl.load(tops + row, wide, 0.0)
    whole = tl.load(wholes + row, wide, 0.0)
    return wide, top, whole, temperature, top_p, min_p, limit, floor_key(top, temperature, min_p)


@triton.jit
def _top_k_bracket(keys, expected):
    """(low, high) of a top-k of which `expected` are in the sample."""
    ones = tl.where(keys > LOWEST_KEY, 1.0, 0.0)
    margin = _DEVIATIONS * (tl.sqrt(expected) + 1.0)
    low = largest_key(keys, ones, expected + margin, NEAR_BITS)
    high = largest_key(keys, ones, expected - margin, NEAR_BITS).to(tl.int64) + _STEP
    return low, tl.where(expected > margin, tl.minimum(high, HIGHEST_KEY), HIGHEST_KEY).to(tl.int32)


@triton.jit
def _variance(total, squares, SAMPLE: tl.constexpr):
    """Of the sum of as many weights, by their sum and that of their squares."""
    return tl.maximum(squares - total * total / SAMPLE, 0.0)


@triton.jit
def _top_p_bracket(
    keys, value, top, temperature, floor, whole, top_p, min_p, share, SAMPLE: tl.constexpr
):  # fmt: skip
    """(low, high) of top-p, from a sample with this share of the row's logits.

    What top-p leaves out is bounded, and not what it keeps: the sample says little about the mass of a few likely
    tokens, but that of the whole row is known, and below a logit no weight is larger than its own."""
    weights = tl.exp((value - top) / temperature)
    kept = tl.where(keys >= floor, weights, 0.0)
    lost = weights - kept
    error = _DEVIATIONS * (tl.sqrt(_variance(tl.sum(lost, 0), tl.sum(lost * lost, 0), SAMPLE)) + min_p)
    sides = tl.arange(0, 2)
    sign = tl.where(sides == 0, 1.0, -1.0)
    error = tl.where(min_p > 0.0, error, 0.0)
    budget = (1.0 - top_p) * (whole.to(tl.float32) * share - tl.sum(lost, 0) - sign * error)
    powers = tl.where(sides[:, None] == 0, kept[None, :], (kept * kept)[None, :])
    found = tl.full([2], LOWEST_KEY, tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(NEAR_BITS):
        trial = (found + step).to(tl.int32)
        below = tl.where(keys[None, None, :] < trial[:, None, None], powers[None, :, :], 0.0)
        mass, squares = tl.split(tl.sum(below, 2))
        edge = tl.where(is_finite(trial), value_of(trial), top)
        largest = tl.exp(tl.minimum((edge - top) / temperature, 0.0))
        bound = mass + sign * _DEVIATIONS * (tl.sqrt(_variance(mass, squares, SAMPLE)) + largest)
        found = tl.where(bound <= budget, found + step, found)
        step = step // 2
    low = tl.max(tl.where(sides == 0, found, LOWEST_KEY), 0)
    high = tl.max(tl.where(sides == 1, found, LOWEST_KEY), 0) + _STEP
    return low.to(tl.int32), tl.minimum(high, HIGHEST_KEY).to(tl.int32)


@triton.jit
def place_bracket(
    brackets, flags, tops, wholes, logits, settings, slots, stride, V,
    SAMPLE: tl.constexpr, BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[L, 2] keys of wide rows, low <= high: the least kept logit is not below low, and below high. Equal where min-p
    alone says which it is; high is the highest of all where top-p follows on top-k, and needs all that this keeps."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wide, top, whole, temperature, top_p, min_p, limit, floor = load_wide(
        row, flags, tops, wholes, settings, slots, V, BY_SLOT, WORDS
    )
    if wide:
        low = floor
        high = floor
        if (limit < V) | (top_p < 1.0):
            keys, value = sampled(logits + row.to(tl.int64) * stride, V, SAMPLE)
            share = tl.minimum(V, SAMPLE).to(tl.float32) / V
            if limit < V:
                low, high = _top_k_bracket(keys, limit.to(tl.float32) * share)
                high = tl.where(top_p < 1.0, HIGHEST_KEY, high)
            else:
                low, high = _top_p_bracket(
                    keys, value, top, temperature, floor, whole, top_p, min_p, share, SAMPLE
                )  # fmt: skip
        low = tl.maximum(low, floor)
        tl.store(brackets + row * 2, low)
        tl.store(brackets + row * 2 + 1, tl.maximum(low, high))


@triton.jit
def scan_parts(
    above, numbers, kept, counts, lists, brackets, flags, tops, wholes, logits, settings, slots, stride, V, P,
    LISTED: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr, BY_SLOT: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[L, P] of the parts of wide rows: the mass above the bracket; how many are; the mass that min-p keeps; how many
    are in the bracket. [L, LISTED] these, ROOM for each part. PART // TILE <= 32; for one
    warp, in which no sum waits for others."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wide, top, _whole, temperature, _top_p, _min_p, _limit, floor = load_wide(
        row, flags, tops, wholes, settings, slots, V, BY_SLOT, WORDS
    )
    if wide:
        low = tl.load(brackets + row * 2)
        high = tl.load(brackets + row * 2 + 1)
        logits += row.to(tl.int64) * stride
        lists += row.to(tl.int64) * LISTED
        lanes = tl.arange(0, TILE)
        inverse = 1.0 / temperature
        for part in range(tl.program_id(1), P, tl.num_programs(1)):
            mass = tl.zeros([TILE], tl.float32)
            everything = tl.zeros([TILE], tl.float32)
            number = tl.zeros([TILE], tl.int32)
            count = tl.zeros([TILE], tl.int32)
            listed = tl.zeros([TILE], tl.int32)
            for tile in tl.range(0, PART // TILE, loop_unroll_factor=4):
                cols = part * PART + tile * TILE + lanes
                value = load_logits(logits + cols, cols < V)
                keys = ordered(value)
                weight = tl.exp((value - top) * inverse)
                mass += tl.where(keys >= high, weight, 0.0)
                everything += tl.where(keys >= floor, weight, 0.0)
                number += (keys >= high).to(tl.int32)
                inside = ((keys >= low) & (keys < high)).to(tl.int32)
                count += inside
                listed |= inside << tile
            place = row * P + part
            tl.store(above + place, tl.sum(mass, 0))
            tl.store(numbers + place, tl.sum(number, 0))
            tl.store(kept + place, tl.sum(everything, 0))
            tl.store(counts + place, tl.sum(count, 0))
            _list_part(lists + part * ROOM, logits + part * PART, listed, count, lanes, TILE, ROOM)


@triton.jit
def _list_part(places, logits, listed, count, lanes, TILE: tl.constexpr, ROOM: tl.constexpr):
    """Store the logits of a part whose bits are set in `listed` [TILE], that of tile i at lane j being number
    i * TILE + j: those of a lane one after the other, `count` of them. Reading these few again costs less than
    storing under a mask that is mostly false, for each of a part."""
    rank = tl.cumsum(count, 0) - count
    while tl.max((listed != 0).to(tl.int32), 0) > 0:
        there = listed != 0
        lowest = (listed & -listed).to(tl.uint32, bitcast=True).to(tl.float32)
        # The exponent of a power of two.
        tile = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
        value = tl.load(logits + tile * TILE + lanes, there, 0.0)
        tl.store(places + rank, value, there & (rank < ROOM))
        rank += there.to(tl.int32)
        listed &= listed - 1
