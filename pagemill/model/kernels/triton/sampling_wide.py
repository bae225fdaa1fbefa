"""Sampling from rows of which many logits may be kept: which of them, the kernels find by pivots (see sampling.py)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton.argmax import ordered
from pagemill.model.kernels.triton.sampling_rows import NEAR_BITS, floor_key, load_logits, load_row, sampled


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
def bracket(reached, pivots, parts, P, floor, top_p, min_p, whole, PIVOTS: tl.constexpr):
    """Keys (low, high) with the least kept logit between them, low included; the mass that is to be kept; which pivot
    is `high`, or -1 for none."""
    numbers = tl.arange(0, PIVOTS)
    places = reached + parts[:, None] * PIVOTS + numbers[None, :]
    written = (parts < P)[:, None] & (numbers >= tl.where(top_p < 1.0, 0, PIVOTS - 1))[None, :]
    above = tl.sum(tl.load(places, written, 0.0).to(tl.float64), 0)
    last = tl.sum(tl.where(numbers == PIVOTS - 1, above, 0.0), 0)
    target = top_p * tl.where(min_p > 0.0, last, whole)
    index = tl.sum((above < target).to(tl.int32), 0)
    keys = tl.load(pivots + numbers)
    low = tl.where(index < PIVOTS, tl.max(tl.where(numbers == index, keys, -0x80000000), 0), floor)
    high = tl.where(index > 0, tl.max(tl.where(numbers == index - 1, keys, -0x80000000), 0), 0x7FFFFFFF)
    which = index - 1
    if top_p >= 1.0:
        low = floor
        high = floor
        which = index * 0 + PIVOTS - 1
    return low, high, target, which


@triton.jit
def place_pivots(
    flags, tops, wholes, pivots, logits, settings, slots, stride, V,
    SAMPLE: tl.constexpr, PIVOTS: tl.constexpr, BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[L, PIVOTS] keys, descending, between which there are about equally many logits, of wide rows without top-k. With
    min-p the last is the least logit that it keeps, and none is below it."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wide, _top, _whole, _temperature, _top_p, min_p, limit, floor = load_wide(
        row, flags, tops, wholes, settings, slots, V, BY_SLOT, WORDS
    )
    if wide & (limit == V):
        numbers = tl.arange(0, PIVOTS)
        keys, _value = sampled(logits + row.to(tl.int64) * stride, V, SAMPLE)
        ranks = tl.maximum((numbers + 1) * tl.minimum(V, SAMPLE) // tl.where(min_p > 0.0, PIVOTS, PIVOTS + 1), 1)
        found = tl.full([PIVOTS], -0x80000000, tl.int64)
        step = tl.full((), 1 << 31, tl.int64)
        for _ in range(NEAR_BITS):
            trial = found + step
            reached = tl.sum((keys[None, :] >= trial.to(tl.int32)[:, None]).to(tl.int32), 1)
            found = tl.where(reached >= ranks, trial, found)
            step = step // 2
        placed = tl.maximum(found.to(tl.int32), floor)
        placed = tl.where(numbers == tl.where(min_p > 0.0, PIVOTS - 1, -1), floor, placed)
        tl.store(pivots + row * PIVOTS + numbers, placed)


@triton.jit
def reach(
    reached, flags, tops, wholes, pivots, logits, settings, slots, stride, V, P,
    PIVOTS: tl.constexpr, PART: tl.constexpr, BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[L, P, PIVOTS] the mass of what reaches each pivot, of wide rows without top-k; without top-p, of the last."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wide, top, _whole, temperature, top_p, _min_p, limit, _floor = load_wide(
        row, flags, tops, wholes, settings, slots, V, BY_SLOT, WORDS
    )
    if wide & (limit == V):
        first = tl.where(top_p < 1.0, 0, PIVOTS - 1)
        for part in range(tl.program_id(1), P, tl.num_programs(1)):
            cols = part * PART + tl.arange(0, PART)
            value = load_logits(logits + row.to(tl.int64) * stride + cols, cols < V)
            keys = ordered(value)
            weight = tl.exp((value - top) / temperature)
            for number in range(first, PIVOTS):
                mass = tl.sum(tl.where(keys >= tl.load(pivots + row * PIVOTS + number), weight, 0.0), 0)
                tl.store(reached + (row.to(tl.int64) * P + part) * PIVOTS + number, mass)


@triton.jit
def list_bracket(
    counts, lists, reached, flags, tops, wholes, pivots, logits, settings, slots, stride, V, P,
    PIVOTS: tl.constexpr, LISTED: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
    BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of wide rows with top-p and without top-k: list what is in the bracket, in order."""
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK_P)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wide, _top, whole, _temperature, top_p, min_p, limit, floor = load_wide(
        row, flags, tops, wholes, settings, slots, V, BY_SLOT, WORDS
    )
    if wide & (limit == V) & (top_p < 1.0):
        low, high, _target, _which = bracket(
            reached + row.to(tl.int64) * P * PIVOTS, pivots + row * PIVOTS, parts, P, floor, top_p, min_p, whole,
            PIVOTS,
        )  # fmt: skip
        for part in range(tl.program_id(1), P, tl.num_programs(1)):
            cols = part * PART + tl.arange(0, PART)
            value = load_logits(logits + row.to(tl.int64) * stride + cols, cols < V)
            keys = ordered(value)
            listed = (keys >= low) & (keys < high) & (cols < V)
            rank = tl.cumsum(listed.to(tl.int32), 0) - 1
            place = lists + (row.to(tl.int64) * P + part) * ROOM + rank
            tl.store(place, value, listed & (rank < ROOM))
            tl.store(counts + row * P + part, tl.sum(listed.to(tl.int32), 0))
