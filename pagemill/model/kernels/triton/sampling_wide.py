"""Sampling from rows of which many logits may be kept: which of them, the kernels find by pivots (see sampling.py)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton.argmax import ordered
from pagemill.model.kernels.triton.sampling_rows import FINITE_KEY, floor_key, largest, load_logits, load_row, row_mass


@triton.jit
def is_wide(
    tops, masses, heads, counts, bound, parts, P, top, temperature, top_p, min_p, limit, V,
    ROOM: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """(whether a row's list does not hold all that may be kept, or has no room; the row's mass; that of the list)."""
    count = tl.load(counts + parts, parts < P, 0)
    number = tl.sum(count, 0)
    whole = tl.sum(row_mass(tops, masses, parts, P, top, temperature), 0)
    held = tl.sum(row_mass(tops, heads, parts, P, top, temperature), 0)
    holds = (bound <= FINITE_KEY) | (min_p > 0.0) | (held >= top_p * whole)
    if limit < V:
        holds = (bound <= FINITE_KEY) | (number >= limit)
    return (tl.max(count, 0) > ROOM) | (number > LISTED) | (not holds), whole, held


@triton.jit
def bracket(
    reached, pivots, bound, parts, P, floor, top_p, min_p, whole, held, PIVOTS: tl.constexpr
):  # fmt: skip
    """Of a wide row: keys (low, high) with the least kept logit between them, low included; the mass that is to be
    kept; which pivot is `high`, or -1 for the bound and -2 for none."""
    numbers = tl.arange(0, PIVOTS)
    places = reached + parts[:, None] * PIVOTS + numbers[None, :]
    above = tl.sum(tl.load(places, (parts < P)[:, None], 0.0).to(tl.float64), 0)
    last = tl.sum(tl.where(numbers == PIVOTS - 1, above, 0.0), 0)
    target = top_p * tl.where(min_p > 0.0, last, whole)
    index = tl.sum((above < target).to(tl.int32), 0)
    keys = tl.maximum(tl.load(pivots + numbers), floor)
    keys = tl.where(numbers == tl.where(min_p > 0.0, PIVOTS - 1, -1), floor, keys)
    low = tl.where(index < PIVOTS, tl.max(tl.where(numbers == index, keys, -0x80000000), 0), floor)
    high = tl.max(tl.where(numbers == index - 1, keys, -0x80000000), 0)
    from_bound = (min_p == 0.0) & (held < target)
    high = tl.where(index > 0, high, tl.where(from_bound, bound, 0x7FFFFFFF))
    which = tl.where(index > 0, index - 1, tl.where(from_bound, -1, -2))
    if top_p >= 1.0:
        low, high, which = floor, floor, PIVOTS - 1
    return low, high, target, which


@triton.jit
def reach(
    reached, tops, masses, heads, counts, bounds, pivots, logits, settings, slots, stride, V, P,
    PIVOTS: tl.constexpr, LISTED: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
    BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[L, P, PIVOTS] the mass of what reaches each pivot, of wide rows without top-k. With min-p the last pivot is the
    least logit that it keeps."""
    row, parts = tl.program_id(0), tl.arange(0, BLOCK_P)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _, temperature, top_p, min_p, limit, _, filters = load_row(settings, slots, row, V, BY_SLOT, WORDS)
    if filters & (limit == V):
        bound, top = tl.load(bounds + row), largest(tops + row * P, parts, P)
        wide, _, _ = is_wide(
            tops + row * P, masses + row * P, heads + row * P, counts + row * P, bound, parts, P, top, temperature,
            top_p, min_p, limit, V, ROOM, LISTED,
        )  # fmt: skip
        floor = floor_key(top, temperature, min_p)
        first = tl.where(top_p < 1.0, 0, PIVOTS - 1)
        if wide:
            for part in range(tl.program_id(1), P, tl.num_programs(1)):
                cols = part * PART + tl.arange(0, PART)
                value = load_logits(logits + row.to(tl.int64) * stride + cols, cols < V)
                keys, weight = ordered(value), tl.exp((value - top) / temperature)
                for number in range(first, PIVOTS):
                    key = tl.maximum(tl.load(pivots + row * PIVOTS + number, top_p < 1.0, FINITE_KEY), floor)
                    key = tl.where((number == PIVOTS - 1) & (min_p > 0.0), floor, key)
                    mass = tl.sum(tl.where(keys >= key, weight, 0.0), 0)
                    tl.store(reached + (row.to(tl.int64) * P + part) * PIVOTS + number, mass)


@triton.jit
def list_bracket(
    later_counts, lists, tops, masses, heads, counts, reached, bounds, pivots, logits, settings, slots, stride, V, P,
    PIVOTS: tl.constexpr, LISTED: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
    BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of wide rows with top-p and without top-k: list what is in the bracket, in order."""
    row, parts = tl.program_id(0), tl.arange(0, BLOCK_P)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _, temperature, top_p, min_p, limit, _, filters = load_row(settings, slots, row, V, BY_SLOT, WORDS)
    if filters & (limit == V) & (top_p < 1.0):
        bound, top = tl.load(bounds + row), largest(tops + row * P, parts, P)
        wide, whole, held = is_wide(
            tops + row * P, masses + row * P, heads + row * P, counts + row * P, bound, parts, P, top, temperature,
            top_p, min_p, limit, V, ROOM, LISTED,
        )  # fmt: skip
        if wide:
            floor = floor_key(top, temperature, min_p)
            low, high, _, _ = bracket(
                reached + row.to(tl.int64) * P * PIVOTS, pivots + row * PIVOTS, bound, parts, P, floor, top_p, min_p,
                whole, held, PIVOTS,
            )  # fmt: skip
            for part in range(tl.program_id(1), P, tl.num_programs(1)):
                cols = part * PART + tl.arange(0, PART)
                value = load_logits(logits + row.to(tl.int64) * stride + cols, cols < V)
                keys = ordered(value)
                listed = (keys >= low) & (keys < high) & (cols < V)
                rank = tl.cumsum(listed.to(tl.int32), 0) - 1
                place = lists + (row.to(tl.int64) * P + part) * ROOM + rank
                tl.store(place, value, listed & (rank < ROOM))
                tl.store(later_counts + row * P + part, tl.sum(listed.to(tl.int32), 0))
