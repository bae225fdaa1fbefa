"""The end of sampling: the least kept logit of a row, and the token that is drawn (see sampling.py)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton.argmax import ordered, value_of
from pagemill.model.kernels.triton.sampling_rows import (
    FINITE_KEY,
    floor_key,
    largest,
    largest_key,
    load_logits,
    load_row,
    row_mass,
    uniform,
)
from pagemill.model.kernels.triton.sampling_wide import bracket, is_wide

_BITS = tl.constexpr(32)
_SURE = tl.constexpr(1.0 - 1e-12)
"""Random numbers are farther from 1 than this is."""


@triton.jit
def _listed(lists, counts, P, floor, top, temperature, ROOM: tl.constexpr, TILE: tl.constexpr):
    """Keys and weights of the list of a row, in order; the lowest, and 0, beyond it and below `floor`."""
    lanes = tl.arange(0, TILE)
    part, start = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    end = tl.zeros((), tl.int32)
    for index in range(0, P):
        end += tl.load(counts + index)
        part += (lanes >= end).to(tl.int32)
        start = tl.where(lanes >= end, end, start)
    value = tl.load(lists + part * ROOM + lanes - start, lanes < end, float("-inf"))
    keys = ordered(value)
    kept = (lanes < end) & (keys >= floor)
    return tl.where(kept, keys, -0x80000000), tl.where(kept, tl.exp((value - top) / temperature), 0.0)


@triton.jit
def _limited(keys, weights, k):
    """The least key of the k largest, and their mass: of its equals as many as there is room for."""
    ones = tl.where(keys >= FINITE_KEY, 1.0, 0.0)
    key = tl.maximum(largest_key(keys, ones, k, _BITS), FINITE_KEY)
    number, mass = tl.sum(tl.where(keys > key, ones, 0.0), 0), tl.sum(tl.where(keys > key, weights, 0.0), 0)
    equal = tl.max(tl.where(keys == key, weights, 0.0), 0)
    return key, mass + tl.maximum(k - number, 0.0) * equal


@triton.jit
def _choose_part(above, weights, count, parts, P, drawn, BLOCK_P: tl.constexpr, TILE: tl.constexpr):
    """The part in which the cumulative mass passes `drawn` times the whole: `above` [P] of each part, and the weights
    of a list, `count` [P] of them in each. (part, the mass before it, that times the whole)."""
    lanes, exact = tl.arange(0, TILE), weights.to(tl.float64)
    total = tl.sum(above, 0) + tl.sum(exact, 0)
    target, before = total * drawn, tl.zeros((), tl.float64)
    found, step = tl.zeros((), tl.int32), tl.full((), BLOCK_P // 2, tl.int32)
    while step > 0:
        trial = found + step
        end = tl.sum(tl.where(parts < trial, count, 0), 0)
        mass = tl.sum(tl.where(parts < trial, above, 0.0), 0) + tl.sum(tl.where(lanes < end, exact, 0.0), 0)
        passed = (trial < P) & (mass <= target) & (mass < total * _SURE)
        found, before = tl.where(passed, trial, found), tl.where(passed, mass, before)
        step = step // 2
    return found, before, target


@triton.jit
def _settle(
    lists, counts, count, above, parts, P, floor, low, target, whole, top, temperature, top_p, min_p, limit, V, drawn, wide,
    ROOM: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """From the list of a row: (key of the least kept logit, part of the token, mass before it, mass to pass, whether
    the list was the right one)."""
    keys, weights = _listed(lists, counts, P, floor, top, temperature, ROOM, TILE)
    least, right = floor, top == top
    if wide:
        rest = target - tl.sum(above, 0)
        # Rounding aside, what is to be found is there.
        right = (rest > 0.0) & ((tl.sum(weights, 0) >= rest * (1 - 1e-5)) | (low <= floor))
        least = tl.maximum(largest_key(keys, weights, rest.to(tl.float32), _BITS), low)
    else:
        mass = whole.to(tl.float32)
        if limit < V:
            least, mass = _limited(keys, weights, limit.to(tl.float32))
        elif min_p > 0.0:
            mass = tl.sum(weights, 0)
        if top_p < 1.0:
            least = tl.maximum(least, largest_key(keys, weights, top_p * mass, _BITS))
    kept = tl.where(keys >= least, weights, 0.0)
    part, before, mass = _choose_part(above, kept, count, parts, P, drawn, BLOCK_P, TILE)
    return least, part, before, mass, right


@triton.jit
def _reach_row(logits, V, key, floor, top, temperature, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The mass, or number, of what reaches a key in all of a row."""
    sums = tl.zeros([TILE], tl.float32)
    for start in range(0, V, TILE):
        cols = start + tl.arange(0, TILE)
        value = load_logits(logits + cols, cols < V)
        weight = tl.full([TILE], 1.0, tl.float32) if COUNT else tl.exp((value - top) / temperature)
        keys = ordered(value)
        sums += tl.where((keys >= key) & (keys >= floor) & (cols < V), weight, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _search_row(logits, V, target, floor, top, temperature, COUNT: tl.constexpr, TILE: tl.constexpr):
    """`largest_key` of all of a row, `floor` at least."""
    found = tl.full((), -0x80000000, tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(_BITS):
        trial = found + step
        reached = _reach_row(logits, V, trial.to(tl.int32), floor, top, temperature, COUNT, TILE)
        found = tl.where(reached >= target, trial, found)
        step = step // 2
    return tl.maximum(found.to(tl.int32), floor)


@triton.jit
def _settle_row(logits, V, P, floor, top, temperature, top_p, limit, drawn, TILE: tl.constexpr):
    """As `_settle` from all of a row."""
    least = floor
    mass = _reach_row(logits, V, floor, floor, top, temperature, False, TILE)
    if limit < V:
        least = _search_row(logits, V, limit.to(tl.float32), floor, top, temperature, True, TILE)
        number = _reach_row(logits, V, least + 1, floor, top, temperature, True, TILE)
        mass = _reach_row(logits, V, least + 1, floor, top, temperature, False, TILE)
        equal = tl.exp((value_of(least) - top) / temperature)
        equals = _reach_row(logits, V, least, floor, top, temperature, False, TILE) - mass
        mass += tl.minimum(tl.maximum(limit.to(tl.float32) - number, 0.0) * equal, tl.maximum(equals, 0.0))
    if top_p < 1.0:
        least = tl.maximum(least, _search_row(logits, V, top_p * mass, floor, top, temperature, False, TILE))
    total = tl.zeros((), tl.float64)
    for part in range(0, P):
        total += tl.sum(_kept(logits, part, V, least, top, temperature, TILE), 0)
    target, found, before, passed = total * drawn, tl.zeros((), tl.int32), total * 0.0, total * 0.0
    for part in range(0, P):
        passed += tl.sum(_kept(logits, part, V, least, top, temperature, TILE), 0)
        is_before = (passed <= target) & (passed < total * _SURE)
        found, before = tl.where(is_before, part + 1, found), tl.where(is_before, passed, before)
    return least, found, before, target


@triton.jit
def _kept(logits, part, V, least, top, temperature, PART: tl.constexpr):
    """[PART] float64: the weights of a part, 0 of what is not kept."""
    cols = part * PART + tl.arange(0, PART)
    value = load_logits(logits + cols, cols < V)
    kept = (ordered(value) >= least) & (cols < V)
    return tl.where(kept, tl.exp((value - top) / temperature), 0.0).to(tl.float64)


@triton.jit
def _draw(
    tops, masses, heads, counts, later_counts, lists, reached, bound, pivots, logits, V, P, temperature, top_p, min_p,
    limit, filters, drawn,
    PIVOTS: tl.constexpr, LISTED: tl.constexpr, FEW: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """The token of a row that is not greedy."""
    parts = tl.arange(0, BLOCK_P)
    top = largest(tops, parts, P)
    floor = floor_key(top, temperature, min_p)
    least, low, target, which = floor, floor, tl.zeros((), tl.float64), tl.full((), -2, tl.int32)
    above = row_mass(tops, masses, parts, P, top, temperature)
    whole, wide, listed, some = tl.sum(above, 0), top != top, filters, counts
    if filters:
        wide, whole, held = is_wide(
            tops, masses, heads, counts, bound, parts, P, top, temperature, top_p, min_p, limit, V, ROOM, LISTED
        )
        if wide & (limit == V):
            low, _, target, which = bracket(
                reached, pivots, bound, parts, P, floor, top_p, min_p, whole, held, PIVOTS
            )  # fmt: skip
            listed, some = top_p < 1.0, later_counts
        if which == -1:
            above = row_mass(tops, heads, parts, P, top, temperature)
        else:
            places = reached + parts * PIVOTS + tl.maximum(which, 0)
            above = tl.load(places, parts < tl.where(which >= 0, P, 0), 0.0).to(tl.float64)
    part, before, mass = tl.zeros((), tl.int32), tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if listed:
        count = tl.load(some + parts, parts < P, 0)
        number = tl.sum(count, 0)
        right = (tl.max(count, 0) <= ROOM) & (number <= LISTED) & ((limit == V) | (wide == 0))
        if right & (number <= FEW):
            least, part, before, mass, right = _settle(
                lists, some, count, above, parts, P, floor, low, target, whole, top, temperature, top_p, min_p, limit,
                V, drawn, wide, ROOM, BLOCK_P, FEW,
            )  # fmt: skip
        elif right:
            least, part, before, mass, right = _settle(
                lists, some, count, above, parts, P, floor, low, target, whole, top, temperature, top_p, min_p, limit,
                V, drawn, wide, ROOM, BLOCK_P, LISTED,
            )  # fmt: skip
        if right == 0:
            least, part, before, mass = _settle_row(
                logits, V, P, floor, top, temperature, top_p, limit, drawn, PART
            )  # fmt: skip
    else:
        none = tl.zeros([BLOCK_P], tl.int32)
        part, before, mass = _choose_part(above, none, none, parts, P, drawn, BLOCK_P, BLOCK_P)
    weights = _kept(logits, part, V, least, top, temperature, PART)
    lanes = tl.arange(0, PART)
    at = tl.sum((before + tl.cumsum(weights, 0) <= mass).to(tl.int32), 0)
    at = tl.minimum(at, tl.max(tl.where(weights > 0.0, lanes, 0), 0))
    return tl.minimum(part * PART + at, V - 1)


@triton.jit
def finish(
    out, tops, masses, heads, counts, later_counts, lists, reached, bounds, pivots, logits, settings, slots, positions,
    stride, V, P,
    FEW: tl.constexpr, PIVOTS: tl.constexpr, LISTED: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr,
    ROOM: tl.constexpr, BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of each row."""
    row, parts = tl.program_id(0), tl.arange(0, BLOCK_P)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place, temperature, top_p, min_p, limit, greedy, filters = load_row(settings, slots, row, V, BY_SLOT, WORDS)
    if greedy:
        top = tl.load(tops + row * P + parts, parts < P, float("-inf"))
        first = tl.load(counts + row * P + parts, parts < P, V - 1)
        token = tl.min(tl.where(top == tl.max(top, 0), first, V - 1), 0)
    else:
        wide_row = row.to(tl.int64) * P
        token = _draw(
            tops + row * P, masses + row * P, heads + row * P, counts + row * P, later_counts + row * P,
            lists + wide_row * ROOM, reached + wide_row * PIVOTS, tl.load(bounds + row), pivots + row * PIVOTS,
            logits + row.to(tl.int64) * stride, V, P, temperature, top_p, min_p, limit, filters,
            uniform(place, tl.load(positions + row).to(tl.int64)),
            PIVOTS, LISTED, FEW, BLOCK_P, PART, ROOM,
        )  # fmt: skip
    tl.store(out + row, token.to(out.dtype.element_ty))
