"""What the kernels of sampling share: keys, weights, searches among them, random numbers, the draw."""

import triton
import triton.language as tl

from pagemill.model.kernels.triton.argmax import ordered

LOWEST_KEY = tl.constexpr(-0x80000000)
HIGHEST_KEY = tl.constexpr(0x7FFFFFFF)
"""Of a NaN, which a row that is sampled from does not have."""
FINITE_KEY = tl.constexpr(-0x7F7FFFFF - 0x1)
"""The least key of a logit that is not minus infinity."""
NEAR_BITS = tl.constexpr(20)
"""Of the key of a bound or pivot: sign, exponent and 11 of the mantissa."""


@triton.jit
def load_logits(places, mask):
    """What is masked, and what is not a number, as minus infinity: never taken."""
    value = tl.load(places, mask, float("-inf"))
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def sampled(logits, V, SAMPLE: tl.constexpr):
    """(keys, values) of SAMPLE logits from all over a row, 8 neighbours at a time; of a short row, of all, and minus
    infinity."""
    lanes = tl.arange(0, SAMPLE)
    spread = (lanes // 8 * V // (SAMPLE // 8)) // 8 * 8 + lanes % 8
    cols = tl.where(V <= SAMPLE, lanes, spread)
    value = load_logits(logits + cols, cols < V)
    return ordered(value), value


@triton.jit
def base_of(top):
    """What weights are relative to: the largest logit; 0 where it is infinite, and less itself would be NaN."""
    return tl.where(tl.abs(top) < float("inf"), top, 0.0)


@triton.jit
def load_row(settings, slots, row, V, BY_SLOT: tl.constexpr, WORDS: tl.constexpr):
    """Where the settings of a row are, and (temperature, top_p, min_p, top_k or V, whether it is greedy, whether it is
    not and leaves tokens out)."""
    place = settings + (tl.load(slots + row) if BY_SLOT else row) * WORDS
    temperature = tl.load(place).to(tl.float32, bitcast=True)
    top_p = tl.load(place + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(place + 2).to(tl.float32, bitcast=True)
    limit, greedy = tl.load(place + 3), tl.load(place + 4)
    limit = tl.where((limit > 0) & (limit < V), limit, V)
    filters = (greedy == 0) & ((limit < V) | (top_p < 1.0) | (min_p > 0.0))
    return place, temperature, top_p, min_p, limit, greedy != 0, filters


@triton.jit
def floor_key(top, temperature, min_p):
    """Key of the least logit that min-p keeps."""
    floor = top + temperature * tl.log(tl.maximum(min_p, 1e-30))
    return tl.where(min_p > 0.0, tl.maximum(ordered(floor), FINITE_KEY), FINITE_KEY)


@triton.jit
def largest_key(keys, weights, target, BITS: tl.constexpr):
    """The largest key, of so many leading bits, for which what reaches it weighs at least `target`; the lowest of all
    if there is none."""
    found = tl.full((), LOWEST_KEY, tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(BITS):
        trial = found + step
        reached = tl.sum(tl.where(keys >= trial.to(tl.int32), weights, 0.0), 0)
        found = tl.where(reached >= target, trial, found)
        step = step // 2
    return found.to(tl.int32)


@triton.jit
def uniform(place, position):
    """In (0, 1), float64: Philox-4x32-10 of the seed's halves and the position, first word."""
    zero = tl.zeros((), tl.uint32)
    c0 = (position & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low, high = tl.load(place + 5).to(tl.uint32, bitcast=True), tl.load(place + 6).to(tl.uint32, bitcast=True)
    word, _, _, _ = tl.philox_impl(c0, c1, zero, zero, low, high, 10)
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
