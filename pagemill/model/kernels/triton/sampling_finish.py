"""The end of sampling from rows of which many logits may be kept: the least of them, and the token that is drawn."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton.argmax import ordered, value_of
from pagemill.model.kernels.triton.sampling_rows import LOWEST_KEY, load_logits, load_row, uniform
from pagemill.model.kernels.triton.sampling_wide import load_wide

_BITS = tl.constexpr(32)
_SURE = tl.constexpr(1.0 - 1e-12)
"""Random numbers are farther from 1 than this is."""


@triton.jit
def _listed(lists, counts, P, floor, top, temperature, ROOM: tl.constexpr, TILE: tl.constexpr):
    """Keys and weights of the list of a row, ROOM for each part; the lowest, and 0, where there is none."""
    lanes = tl.arange(0, TILE)
    part = lanes // ROOM
    count = tl.load(counts + part, part < P, 0)
    value = tl.load(lists + lanes, lanes - part * ROOM < count, float("-inf"))
    keys = ordered(value)
    there = keys >= floor
    return tl.where(there, keys, LOWEST_KEY), tl.where(there, tl.exp((value - top) / temperature), 0.0)


@triton.jit
def _choose_part(above, weights, parts, P, drawn, ROOM: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr):
    """The part in which the cumulative mass passes `drawn` times the whole: `above` [P] of each part, and the weights
    of a list, ROOM of them in each. (part, the mass before it, that times the whole)."""
    lanes = tl.arange(0, TILE)
    exact = weights.to(tl.float64)
    total = tl.sum(above, 0) + tl.sum(exact, 0)
    target = total * drawn
    before = tl.zeros((), tl.float64)
    found = tl.zeros((), tl.int32)
    step = tl.full((), BLOCK_P // 2, tl.int32)
    while step > 0:
        trial = found + step
        mass = tl.sum(tl.where(parts < trial, above, 0.0), 0) + tl.sum(tl.where(lanes < trial * ROOM, exact, 0.0), 0)
        passed = (trial < P) & (mass <= target) & (mass < total * _SURE)
        found, before = tl.where(passed, trial, found), tl.where(passed, mass, before)
        step = step // 2
    return found, before, target


@triton.jit
def _largest_between(keys, weights, target, low, high):
    """The largest key, `low` at least and below `high`, for which what reaches it weighs at least `target`."""
    found = low.to(tl.int64)
    span = high.to(tl.int64) - found
    step = tl.full((), 1, tl.int64)
    while step * 2 < span:
        step = step * 2
    while step > 0:
        trial = found + step
        reached = tl.sum(tl.where(keys >= trial.to(tl.int32), weights, 0.0), 0)
        found = tl.where((reached >= target) & (trial < high), trial, found)
        step = step // 2
    return found.to(tl.int32)


@triton.jit
def _least_of_list(keys, weights, number, mass, whole, limit, V, top_p, low, high, top, temperature):
    """(key of the least kept logit, whether the list has it), where `number` logits of this mass are above the list,
    and the row, or what min-p keeps of it, weighs `whole`."""
    high = tl.minimum(high.to(tl.int64), ordered(top).to(tl.int64) + 1)
    there = tl.where(keys > LOWEST_KEY, 1.0, 0.0)
    least = low
    missing = top_p * whole - mass
    enough = (missing > 0.0) & (tl.sum(weights, 0) >= missing * (1 - 1e-5))
    if limit < V:
        wanted = (limit - number).to(tl.float32)
        enough = (wanted > 0.0) & (tl.sum(there, 0) >= wanted)
        least = tl.where(enough, _largest_between(keys, there, wanted, low, high), LOWEST_KEY)
        over = keys > least
        equal = tl.where(least > LOWEST_KEY, tl.exp((value_of(least) - top) / temperature), 0.0)
        # Of its equals as many as top-k has room for. Here nothing is above the list.
        room = tl.maximum(wanted - tl.sum(tl.where(over, there, 0.0), 0), 0.0)
        missing = top_p * (tl.sum(tl.where(over, weights, 0.0), 0) + room * equal).to(tl.float64)
    if top_p < 1.0:
        least = tl.maximum(least, _largest_between(keys, weights, missing.to(tl.float32), low, high))
    return tl.maximum(least, low), enough


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
    above, numbers, kept, counts, lists, bracket, logits, parts, P, floor, top, whole, temperature, top_p, min_p, limit,
    V, drawn,
    LISTED: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The token of a wide row: by its list, by min-p alone, or by reading all of it often."""
    low = tl.load(bracket)
    high = tl.load(bracket + 1)
    masses = tl.load(above + parts, parts < P, 0.0).to(tl.float64)
    least = low
    part = low * 0
    before = whole * 0.0
    mass = whole * 0.0
    right = low >= high
    if right:
        none = tl.zeros([BLOCK_P], tl.float32)
        part, before, mass = _choose_part(masses, none, parts, P, drawn, ROOM, BLOCK_P, BLOCK_P)
    elif tl.max(tl.load(counts + parts, parts < P, 0), 0) <= ROOM:
        number = tl.sum(tl.load(numbers + parts, (parts < P) & (limit < V), 0), 0)
        if (min_p > 0.0) & (top_p < 1.0):
            whole = tl.sum(tl.load(kept + parts, parts < P, 0.0).to(tl.float64), 0)
        keys, weights = _listed(lists, counts, P, floor, top, temperature, ROOM, LISTED)
        least, enough = _least_of_list(
            keys, weights, number, tl.sum(masses, 0), whole, limit, V, top_p, low, high, top, temperature
        )  # fmt: skip
        # Rounding aside, what is to be found is there.
        right = enough | (low <= floor)
        weights = tl.where(keys >= least, weights, 0.0)
        part, before, mass = _choose_part(masses, weights, parts, P, drawn, ROOM, BLOCK_P, LISTED)
    if right == 0:
        least, part, before, mass = _settle_row(logits, V, P, floor, top, temperature, top_p, limit, drawn, PART)
    return _token(logits, part, before, mass, least, V, top, temperature, PART)


@triton.jit
def finish_wide(
    out, positions, above, numbers, kept, counts, lists, brackets, flags, tops, wholes, logits, settings, slots, stride,
    V, P,
    LISTED: tl.constexpr, BLOCK_P: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
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
        token = _draw_wide(
            above + row * P, numbers + row * P, kept + row * P, counts + row * P, lists + row.to(tl.int64) * LISTED,
            brackets + row * 2, logits + row.to(tl.int64) * stride, parts, P, floor, top, whole, temperature, top_p,
            min_p, limit, V, uniform(place, tl.load(positions + row).to(tl.int64)), LISTED, BLOCK_P, PART, ROOM,
        )  # fmt: skip
        tl.store(out + row, token.to(out.dtype.element_ty))
