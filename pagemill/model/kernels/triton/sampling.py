"""Sampling without sorting: temperature, min-p, top-k, top-p and one draw per row, in two kernels. Knows no request.

The first finds the maximum and the mass of every group of 128 logits. The k-th largest group maximum is a lower bound
of the k-th largest logit, so the second kernel gathers only what is above such a bound (all of the row where that does
not do), and searches the least kept logit bit by bit in the order of floats. Thresholds, ties and noise are those of
worker/sampling; no atomics, so runs repeat. Random numbers: philox.py there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.argmax import ordered, value_of

_GROUP = 128
_GROUPS_AT_ONCE = 32
_MAX_CANDIDATES = 4096
"""Of a row; rows with more are read in full."""
_NUCLEUS_GROUPS = 256
"""Without top-k, what is above this many group maxima is looked at first."""
_TILE = 1024
NUM_SETTINGS = 7
"""int32 words of a row of settings: temperature, top_p, min_p (float32), top_k, greedy, seed (low, high)."""

_LOWEST_KEY = tl.constexpr(-0x80000000)
_PIVOTS = tl.constexpr(8)


@triton.jit
def _load(places, mask):
    """Logits; what is masked, and what is not a number, as minus infinity: never taken."""
    value = tl.load(places, mask, float("-inf"))
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _group_stats(
    maxima, masses, logits, settings, slots, stride, V, G,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    cols = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(slots + row) if BY_SLOT else row
    temperature = tl.load(settings + place * WORDS).to(tl.float32, bitcast=True)
    value = _load(logits + row.to(tl.int64) * stride + cols, cols < V)
    top = tl.max(value, 1)
    # Where all of a group is masked, minus infinity less itself would be NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(tl.exp((value - base[:, None]) / temperature), 1)
    tl.store(maxima + row * G + groups, top, groups < G)
    tl.store(masses + row * G + groups, mass, groups < G)


@triton.jit
def _kth_largest(keys, k):
    """The largest key that at least k keys reach."""
    found = tl.full((), _LOWEST_KEY, tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(32):
        trial = found + step
        reached = tl.sum((keys >= trial.to(tl.int32)).to(tl.int32), 0)
        found = tl.where(reached >= k, trial, found)
        step = step // 2
    return found


@triton.jit
def _weights(values, start, count, floor, top, temperature, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Keys and weights of a tile; what is below `floor` weighs nothing. COUNT: every weight is 1."""
    index = start + tl.arange(0, TILE)
    value = _load(values + index, index < count)
    weight = tl.full([TILE], 1.0, tl.float32) if COUNT else tl.exp((value - top) / temperature)
    return ordered(value), tl.where((index < count) & (value >= floor), weight, 0.0)


@triton.jit
def _reach(values, count, floor, top, temperature, pivots, COUNT: tl.constexpr, TILE: tl.constexpr):
    """[8] float32: the weight of what reaches each pivot (int32)."""
    sums = tl.zeros([_PIVOTS, TILE], tl.float32)
    for start in range(0, count, TILE):
        keys, weight = _weights(values, start, count, floor, top, temperature, COUNT, TILE)
        sums += tl.where(keys[None, :] >= pivots[:, None], weight[None, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _search(values, count, floor, top, temperature, target, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The largest key for which what reaches it weighs at least `target`, three bits a pass; the lowest if none."""
    found = tl.full((), _LOWEST_KEY, tl.int64)
    step = tl.full((), 1 << 30, tl.int64)
    for _ in range(11):
        pivots = found + tl.arange(0, _PIVOTS).to(tl.int64) * step
        inside = pivots < 0x80000000
        keys = tl.where(inside, pivots, 0x7FFFFFFF).to(tl.int32)
        reached = _reach(values, count, floor, top, temperature, keys, COUNT, TILE)
        passed = (reached >= target) & inside
        # The first pivot stands for what is known already.
        best = tl.max(tl.where(passed, tl.arange(0, _PIVOTS), 0), 0)
        found += best.to(tl.int64) * step
        step = step // 8
    return found


@triton.jit
def _top_k_mass(values, count, floor, top, temperature, key, k, TILE: tl.constexpr):
    """The mass of exactly k logits, the least of which has this key: of its equals as many as there is room for. The
    lowest key says that there are fewer than k, whose mass it is then."""
    above = (tl.zeros([_PIVOTS], tl.int64) + key + 1).to(tl.int32)
    number = tl.max(_reach(values, count, floor, top, temperature, above, True, TILE), 0)
    mass = tl.max(_reach(values, count, floor, top, temperature, above, False, TILE), 0)
    equal = tl.where(key > _LOWEST_KEY, tl.exp((value_of(key) - top) / temperature), 0.0)
    return mass + tl.maximum(k - number, 0.0) * equal


@triton.jit
def _uniform(low, high, position):
    """In (0, 1), float64: Philox-4x32-10 of the seed's halves and the position, first word."""
    zero = tl.zeros((), tl.uint32)
    c0 = (position & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    word, _, _, _ = tl.philox_impl(c0, c1, zero, zero, low, high, 10)
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _gather(candidates, indices, group_ids, logits, maximum, bound, V, G, GROUP: tl.constexpr,
            BLOCK_G: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """Write the logits of a row that reach `bound`, in order, with their indices: MOST at most. Returns how many do."""
    groups = tl.arange(0, BLOCK_G)
    wanted = ((maximum >= bound) & (groups < G)).to(tl.int32)
    tl.store(group_ids + tl.cumsum(wanted, 0) - 1, groups, wanted > 0)
    # Other threads wrote what is read next.
    tl.debug_barrier()
    num_groups = tl.sum(wanted, 0)
    found = tl.zeros((), tl.int32)
    for start in range(0, num_groups * GROUP, TILE):
        lane = start + tl.arange(0, TILE)
        group = tl.load(group_ids + lane // GROUP, lane < num_groups * GROUP, 0)
        cols = group * GROUP + lane % GROUP
        value = tl.load(logits + cols, (lane < num_groups * GROUP) & (cols < V), float("-inf"))
        kept = (value >= bound) & (lane < num_groups * GROUP) & (cols < V)
        rank = found + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(candidates + rank, value, kept & (rank < MOST))
        tl.store(indices + rank, cols, kept & (rank < MOST))
        found += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def _pick(values, count, threshold, floor, top, temperature, uniform, TILE: tl.constexpr):
    """Where the cumulative mass of what reaches the threshold passes `uniform` times the whole, in order of indices."""
    key = threshold.to(tl.int32)
    total = tl.zeros((), tl.float64)
    last = tl.zeros((), tl.int32)
    for start in range(0, count, TILE):
        keys, weight = _weights(values, start, count, floor, top, temperature, False, TILE)
        weight = tl.where(keys >= key, weight, 0.0)
        total += tl.sum(weight.to(tl.float64), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, start + tl.arange(0, TILE), 0), 0))
    target = total * uniform
    before = tl.zeros((), tl.float64)
    position = tl.zeros((), tl.int32)
    for start in range(0, count, TILE):
        keys, weight = _weights(values, start, count, floor, top, temperature, False, TILE)
        weight = tl.where(keys >= key, weight, 0.0).to(tl.float64)
        passed = before + tl.cumsum(weight, 0) <= target
        position += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(weight, 0)
    return tl.minimum(position, last)


@triton.jit
def _likeliest(logits, maximum, V, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """The first of the largest logits."""
    groups = tl.arange(0, BLOCK_G)
    group = tl.min(tl.where(maximum == tl.max(maximum, 0), groups, BLOCK_G), 0)
    cols = group * GROUP + tl.arange(0, GROUP)
    value = _load(logits + cols, cols < V)
    token = tl.min(tl.where(value == tl.max(value, 0), cols, V - 1), 0)
    return tl.minimum(token, V - 1)


@triton.jit
def _least_kept(values, count, floor, top, temperature, k, V, top_p, min_p, whole, TILE: tl.constexpr):
    """Key of the least logit that top-k and top-p keep; `whole` is the mass of the row, where nothing limits it."""
    threshold = tl.full((), _LOWEST_KEY, tl.int64)
    if k < V:
        threshold = _search(values, count, floor, top, temperature, k.to(tl.float32), True, TILE)
        if top_p < 1.0:
            whole = _top_k_mass(values, count, floor, top, temperature, threshold, k.to(tl.float32), TILE)
    elif (min_p > 0.0) & (top_p < 1.0):
        lowest = tl.full([_PIVOTS], -0x80000000, tl.int32)
        whole = tl.max(_reach(values, count, floor, top, temperature, lowest, False, TILE), 0)
    if top_p < 1.0:
        nucleus = _search(values, count, floor, top, temperature, top_p * whole, False, TILE)
        threshold = tl.maximum(threshold, nucleus)
    return threshold


@triton.jit
def _sample(
    out, logits, maxima, masses, group_ids, candidates, indices, settings, slots, positions, stride, V, G,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr, NUCLEUS: tl.constexpr,
    BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    groups = tl.arange(0, BLOCK_G)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = settings + (tl.load(slots + row) if BY_SLOT else row) * WORDS
    temperature = tl.load(place).to(tl.float32, bitcast=True)
    top_p = tl.load(place + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(place + 2).to(tl.float32, bitcast=True)
    limit = tl.load(place + 3)
    k = tl.where((limit > 0) & (limit < V), limit, V)
    greedy = tl.load(place + 4) != 0
    logits += row.to(tl.int64) * stride
    maximum = tl.load(maxima + row * G + groups, groups < G, float("-inf"))
    top = tl.max(maximum, 0)
    # A row with nothing to draw gives some token.
    top = tl.where(top == float("-inf"), 0.0, top)
    if greedy:
        tl.store(out + row, _likeliest(logits, maximum, V, GROUP, BLOCK_G).to(out.dtype.element_ty))
    else:
        uniform = _uniform(tl.load(place + 5), tl.load(place + 6), tl.load(positions + row).to(tl.int64))
        floor = tl.where(min_p > 0.0, top + temperature * tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
        # The greatest bound that leaves out nothing of what may be kept.
        keys = ordered(maximum)
        rank = tl.where(k < V, k, tl.where((top_p < 1.0) & (min_p <= 0.0), NUCLEUS, G + 1))
        bound = tl.where(rank <= G, value_of(_kth_largest(keys, tl.minimum(rank, G))), float("-inf"))
        bound = tl.maximum(bound, floor)
        found = tl.full((), MOST + 1, tl.int32)
        candidates += row * MOST
        indices += row * MOST
        if bound > float("-inf"):
            found = _gather(
                candidates, indices, group_ids + row * G, logits, maximum, bound, V, G, GROUP, BLOCK_G, TILE, MOST
            )
        mass = tl.load(masses + row * G + groups, groups < G, 0.0)
        whole = tl.sum(mass * tl.exp((maximum - top) / temperature), 0)
        in_full = (found > MOST) | (found == 0)
        if (k >= V) & (top_p < 1.0) & (min_p <= 0.0) & (found <= MOST):
            # The candidates must hold the nucleus.
            lowest = tl.full([_PIVOTS], -0x80000000, tl.int32)
            held = tl.max(_reach(candidates, found, floor, top, temperature, lowest, False, TILE), 0)
            in_full = held < top_p * whole
        values = tl.where(in_full, logits, candidates)
        count = tl.where(in_full, V, found)
        threshold = _least_kept(values, count, floor, top, temperature, k, V, top_p, min_p, whole, TILE)
        at = _pick(values, count, threshold, floor, top, temperature, uniform, TILE)
        if in_full:
            tl.store(out + row, at.to(out.dtype.element_ty))
        else:
            tl.store(out + row, tl.load(indices + at).to(out.dtype.element_ty))


def sample(
    logits: Tensor, settings: Tensor, positions: Tensor, slots: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """[L, V] float32 -> [L] int64, or into `out` [L]: one token of each row; logits stay as they are.

    settings [L, 7] int32 as NUM_SETTINGS says, or of slots with `slots` [L]; positions [L] of the tokens to be sampled.
    Greedy rows take the first of their largest logits.
    """
    num_rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    logits = logits.float()
    num_groups = triton.cdiv(vocab_size, _GROUP)
    stats = torch.empty(2, num_rows, num_groups, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_groups, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(num_rows, _MAX_CANDIDATES, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, _MAX_CANDIDATES, dtype=torch.int32, device=logits.device)
    fixed = {
        "GROUP": _GROUP, "BY_SLOT": slots is not None, "WORDS": NUM_SETTINGS, "PDL": launch.dependent(),
    }  # fmt: skip
    places = positions if slots is None else slots
    launch.on(_group_stats, (num_rows, triton.cdiv(num_groups, _GROUPS_AT_ONCE)))(
        stats[0], stats[1], logits, settings, places, logits.stride(0), vocab_size, num_groups,
        GROUPS=_GROUPS_AT_ONCE, **fixed, **launch.options(8),
    )  # fmt: skip
    launch.on(_sample, (num_rows,))(
        out, logits, stats[0], stats[1], ids, candidates, indices, settings, places, positions, logits.stride(0),
        vocab_size, num_groups, BLOCK_G=launch.power_of_two(num_groups), TILE=_TILE, MOST=_MAX_CANDIDATES,
        NUCLEUS=_NUCLEUS_GROUPS, **fixed, **launch.options(8),
    )  # fmt: skip
    return out
