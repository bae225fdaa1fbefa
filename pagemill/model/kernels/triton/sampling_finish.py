"""The end of sampling from rows of which many logits may be kept: the least of them, and the token that is drawn."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton.argmax import ordered, value_of
from pagemill.model.kernels.triton.sampling_rows import largest_key, load_logits, load_row, uniform
from pagemill.model.kernels.triton.sampling_wide import bracket, load_wide

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
def _choose_part(above, weights, count, parts, P, drawn, BLOCK_P: tl.constexpr, TILE: tl.constexpr):
    """The part in which the cumulative mass passes `drawn` times the whole: `above` [P] of each part, and the weights
    of a list, `count` [P] of them in each. (part, the mass before it, that times the whole)."""
    lanes = tl.arange(0, TILE)
    exact = weights.to(tl.float64)
    total = tl.sum(above, 0) + tl.sum(exact, 0)
    target = total * drawn
    before = tl.zeros((), tl.float64)
    found = tl.zeros((), tl.int32)
    step = tl.full((), BLOCK_P // 2, tl.int32)
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
    lists, counts, count, above, parts, P, floor, low, target, top, temperature, drawn,
    ROOM: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """From the list of a row: (key of the least kept logit, part of the token, mass before it, mass to pass, whether
    the list was the right one)."""
    keys, weights = _listed(lists, counts, P, floor, top, temperature, ROOM, TILE)
    rest = target - tl.sum(above, 0)
    # Rounding aside, what is to be found is there.
    right = (rest > 0.0) & ((tl.sum(weights, 0) >= rest * (1 - 1e-5)) | (low <= floor))
    least = tl.maximum(largest_key(keys, weights, rest.to(tl.float32), _BITS), low)
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
    target = total * drawn
    found = tl.zeros((), tl.int32)
    before = total * 0.0
    passed = total * 0.0
    for part in range(0, P):
        passed += tl.sum(_kept(logits, part, V, least, top, temperature, TILE), 0)
        is_before = (passed <= target) & (passed < total * _SURE)
        found = tl.where(is_before, part + 1, found)
        before = tl.where(is_before, passed, before)
    return least, found, before, target


@triton.jit
def _kept(logits, part, V, least, top, temperature, PART: tl.constexpr):
    """[PART] float64: the weights of a part, 0 of what is not kept."""
    cols = part * PART + tl.arange(0, PART)
    value = load_logits(logits + cols, cols < V)
    kept = (ordered(value) >= least) & (cols < V)
    return tl.where(kept, tl.exp((value - top) / temperature), 0.0).to(tl.float64)


@triton.jit
def _token(logits, part, before, mass, least, V, top, temperature, PART: tl.constexpr):
    """Where the cumulative mass passes `mass`, in a part that has `before` before it."""
    weights = _kept(logits, part, V, least, top, temperature, PART)
    lanes = tl.arange(0, PART)
    at = tl.sum((before + tl.cumsum(weights, 0) <= mass).to(tl.int32), 0)
    at = tl.minimum(at, tl.max(tl.where(weights > 0.0, lanes, 0), 0))
    return tl.minimum(part * PART + at, V - 1)


@triton.jit
def _draw_wide(
    counts, lists, reached, pivots, logits, parts, P, floor, top, whole, temperature, top_p, min_p, limit, V, drawn,
    PIVOTS: tl.constexpr, LISTED: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The token of a wide row: by its list, by min-p alone, or by reading all of it often."""
    least = floor
    part = floor * 0
    before = whole * 0.0
    mass = whole * 0.0
    right = limit == V
    if right:
        low, _high, target, which = bracket(reached, pivots, parts, P, floor, top_p, min_p, whole, PIVOTS)
        places = reached + parts * PIVOTS + tl.maximum(which, 0)
        above = tl.load(places, parts < tl.where(which >= 0, P, 0), 0.0).to(tl.float64)
        if top_p < 1.0:
            count = tl.load(counts + parts, parts < P, 0)
            right = (tl.max(count, 0) <= ROOM) & (tl.sum(count, 0) <= LISTED)
            if right:
                least, part, before, mass, right = _settle(
                    lists, counts, count, above, parts, P, floor, low, target, top, temperature, drawn, ROOM,
                    BLOCK_P, LISTED,
                )  # fmt: skip
        else:
            none = tl.zeros([BLOCK_P], tl.int32)
            part, before, mass = _choose_part(above, none, none, parts, P, drawn, BLOCK_P, BLOCK_P)
    if right == 0:
        least, part, before, mass = _settle_row(logits, V, P, floor, top, temperature, top_p, limit, drawn, PART)
    return _token(logits, part, before, mass, least, V, top, temperature, PART)


@triton.jit
def finish_wide(
    out, positions, counts, lists, reached, flags, tops, wholes, pivots, logits, settings, slots, stride, V, P,
    PIVOTS: tl.constexpr, LISTED: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
    BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of each wide row."""
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK_P)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wide, top, whole, temperature, top_p, min_p, limit, floor = load_wide(
        row, flags, tops, wholes, settings, slots, V, BY_SLOT, WORDS
    )
    if wide:
        place, _t, _p, _m, _limit, _greedy, _filters = load_row(settings, slots, row, V, BY_SLOT, WORDS)
        parts_before = row.to(tl.int64) * P
        token = _draw_wide(
            counts + row * P, lists + parts_before * ROOM, reached + parts_before * PIVOTS, pivots + row * PIVOTS,
            logits + row.to(tl.int64) * stride, parts, P, floor, top, whole, temperature, top_p, min_p, limit, V,
            uniform(place, tl.load(positions + row).to(tl.int64)), PIVOTS, LISTED, BLOCK_P, PART, ROOM,
        )  # fmt: skip
        tl.store(out + row, token.to(out.dtype.element_ty))
