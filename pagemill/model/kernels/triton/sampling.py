"""Sampling without sorting: temperature, min-p, top-k, top-p and one draw per row. Knows no request.

`_group_stats` finds the maximum and the mass of every group of 128 logits. The k-th largest group maximum is a lower
bound of the k-th largest logit, so `_sample` gathers only what is above such a bound, and searches the least kept logit
bit by bit in the order of floats. Rows of which more may be kept than it has room for are left to sampling_wide.py and
sampling_finish.py, whose kernels end at once where there is none. Thresholds, ties and noise are those of
worker/sampling; no atomics, so runs repeat. Random numbers: philox.py there.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.argmax import is_finite, ordered, value_of
from pagemill.model.kernels.triton.sampling_finish import finish_wide
from pagemill.model.kernels.triton.sampling_rows import (
    LOWEST_KEY,
    base_of,
    load_logits,
    load_row,
    uniform,
)
from pagemill.model.kernels.triton.sampling_wide import place_bracket, scan_parts

_GROUP = 128
_GROUPS_AT_ONCE = 32
_MAX_CANDIDATES = 8192
"""Of a row; rows with more are wide."""
_NUCLEUS_GROUPS = 128
"""Without top-k, what is above this many group maxima is looked at first."""
_RANKED = 256
"""A row with more than this in top-k is wide."""
_TILE = 1024
_SAMPLE = 4096
"""Logits of a wide row that its bracket comes from."""
_PART = 2048
"""Logits of a wide row that are summed up and listed by themselves."""
_PART_TILE = 128
_LISTED = 16384
"""Logits of a wide row that have room in its list, twice as many in those of a large vocabulary."""
_LARGE = 80 * _PART
"""Vocabularies up to this are not large."""
_PROGRAMS = 4096
"""Of a kernel for wide rows: those that find nothing to do cost time, too."""
NUM_SETTINGS = 7
"""int32 words of a row of settings: temperature, top_p, min_p (float32), top_k, greedy, seed (low, high)."""

_PIVOTS_AT_ONCE = tl.constexpr(8)


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
    value = tl.load(logits + row.to(tl.int64) * stride + cols, cols < V, float("-inf"))
    # What else is found of a row with a NaN is of no use.
    best = tl.max(value, 1)
    best = tl.where(tl.sum((value != value).to(tl.int32), 1) > 0, float("nan"), best)
    mass = tl.sum(tl.exp((value - base_of(best)[:, None]) / temperature), 1)
    tl.store(maxima + row * G + groups, best, groups < G)
    tl.store(masses + row * G + groups, mass, groups < G)


@triton.jit
def _kth_largest(keys, k):
    """The largest key that at least k keys reach."""
    found = tl.full((), LOWEST_KEY, tl.int64)
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
    value = load_logits(values + index, index < count)
    weight = tl.full([TILE], 1.0, tl.float32) if COUNT else tl.exp((value - top) / temperature)
    return ordered(value), tl.where((index < count) & (value >= floor), weight, 0.0)


@triton.jit
def _reach(values, count, floor, top, temperature, pivots, COUNT: tl.constexpr, TILE: tl.constexpr):
    """[8] float32: the weight of what reaches each pivot (int32)."""
    sums = tl.zeros([_PIVOTS_AT_ONCE, TILE], tl.float32)
    for start in range(0, count, TILE):
        keys, weight = _weights(values, start, count, floor, top, temperature, COUNT, TILE)
        sums += tl.where(keys[None, :] >= pivots[:, None], weight[None, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _search(values, count, floor, top, temperature, target, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The largest key for which what reaches it weighs at least `target`, three bits a pass; the lowest if none."""
    found = tl.full((), LOWEST_KEY, tl.int64)
    step = tl.full((), 1 << 30, tl.int64)
    for _ in range(11):
        pivots = found + tl.arange(0, _PIVOTS_AT_ONCE).to(tl.int64) * step
        inside = pivots < 0x80000000
        keys = tl.where(inside, pivots, 0x7FFFFFFF).to(tl.int32)
        reached = _reach(values, count, floor, top, temperature, keys, COUNT, TILE)
        passed = (reached >= target) & inside
        # The first pivot stands for what is known already.
        best = tl.max(tl.where(passed, tl.arange(0, _PIVOTS_AT_ONCE), 0), 0)
        found += best.to(tl.int64) * step
        step = step // 8
    return found


@triton.jit
def _top_k_mass(values, count, floor, top, temperature, key, k, TILE: tl.constexpr):
    """The mass of exactly k logits, the least of which has this key: of its equals as many as there is room for. The
    lowest key says that there are fewer than k, whose mass it is then."""
    above = (tl.zeros([_PIVOTS_AT_ONCE], tl.int64) + key + 1).to(tl.int32)
    number = tl.max(_reach(values, count, floor, top, temperature, above, True, TILE), 0)
    mass = tl.max(_reach(values, count, floor, top, temperature, above, False, TILE), 0)
    equal = tl.where(key > LOWEST_KEY, tl.exp((value_of(key) - top) / temperature), 0.0)
    return mass + tl.maximum(k - number, 0.0) * equal


@triton.jit
def _gather(candidates, indices, group_ids, logits, maximum, bound, V, G, GROUP: tl.constexpr,
            BLOCK_G: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """Write the logits of a row that reach `bound`, in order, with their indices: MOST at most. Returns how many do,
    or that they are more than MOST."""
    groups = tl.arange(0, BLOCK_G)
    wanted = ((maximum >= bound) & (groups < G)).to(tl.int32)
    tl.store(group_ids + tl.cumsum(wanted, 0) - 1, groups, wanted > 0)
    # Other threads wrote what is read next.
    tl.debug_barrier()
    num_groups = tl.sum(wanted, 0)
    found = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    while (start < num_groups * GROUP) & (found <= MOST):
        lane = start + tl.arange(0, TILE)
        group = tl.load(group_ids + lane // GROUP, lane < num_groups * GROUP, 0)
        cols = group * GROUP + lane % GROUP
        value = tl.load(logits + cols, (lane < num_groups * GROUP) & (cols < V), float("-inf"))
        kept = (value >= bound) & (lane < num_groups * GROUP) & (cols < V)
        rank = found + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(candidates + rank, value, kept & (rank < MOST))
        tl.store(indices + rank, cols, kept & (rank < MOST))
        found += tl.sum(kept.to(tl.int32), 0)
        start += TILE
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
    value = load_logits(logits + cols, cols < V)
    token = tl.min(tl.where(value == tl.max(value, 0), cols, V - 1), 0)
    return tl.minimum(token, V - 1)


@triton.jit
def _least_kept(values, count, floor, top, temperature, k, V, top_p, min_p, whole, TILE: tl.constexpr):
    """Key of the least logit that top-k and top-p keep; `whole` is the mass of the row, where nothing limits it."""
    threshold = tl.full((), LOWEST_KEY, tl.int64)
    if k < V:
        threshold = _search(values, count, floor, top, temperature, k.to(tl.float32), True, TILE)
        if top_p < 1.0:
            whole = _top_k_mass(values, count, floor, top, temperature, threshold, k.to(tl.float32), TILE)
    elif (min_p > 0.0) & (top_p < 1.0):
        lowest = tl.full([_PIVOTS_AT_ONCE], -0x80000000, tl.int32)
        whole = tl.max(_reach(values, count, floor, top, temperature, lowest, False, TILE), 0)
    if top_p < 1.0:
        nucleus = _search(values, count, floor, top, temperature, top_p * whole, False, TILE)
        threshold = tl.maximum(threshold, nucleus)
    return threshold


@triton.jit
def _draw_any(logits, maximum, mass, groups, top, V, temperature, drawn, GROUP: tl.constexpr):
    """The token of a row of which nothing is left out: its group by the groups' masses, then within it."""
    share = mass.to(tl.float64) * tl.exp((base_of(maximum) - top) / temperature).to(tl.float64)
    target = tl.sum(share, 0) * drawn
    last = tl.max(tl.where(share > 0.0, groups, 0), 0)
    group = tl.minimum(tl.sum((tl.cumsum(share, 0) <= target).to(tl.int32), 0), last)
    before = tl.sum(tl.where(groups < group, share, 0.0), 0)
    cols = group * GROUP + tl.arange(0, GROUP)
    weight = tl.exp((load_logits(logits + cols, cols < V) - top) / temperature).to(tl.float64)
    passed = before + tl.cumsum(weight, 0) <= target
    at = tl.minimum(tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(weight > 0.0, tl.arange(0, GROUP), 0), 0))
    return tl.minimum(group * GROUP + at, V - 1)


@triton.jit
def _bound(
    maximum, whole, share, floor, k, V, G, top_p, min_p, NUCLEUS: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """A bound that no logit that may be kept is below; minus infinity where so many may be kept that looking for them
    is of no use."""
    bound = floor
    if (k < V) & (k > RANKED):
        bound = tl.full((), float("-inf"), tl.float32)
    elif (k < V) | (min_p == 0.0):
        rank = tl.where(k < V, k, NUCLEUS)
        ranked = tl.where(rank <= G, value_of(_kth_largest(ordered(maximum), tl.minimum(rank, G))), float("-inf"))
        worth = (k < V) | (tl.sum(tl.where(maximum >= ranked, share, 0.0), 0) >= top_p * whole)
        bound = tl.where(worth, tl.maximum(ranked, floor), float("-inf"))
    return bound


@triton.jit
def _sample(
    out, wide, tops, wholes, logits, maxima, masses, group_ids, candidates, indices, settings, slots, positions, stride,
    V, G,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr, NUCLEUS: tl.constexpr,
    RANKED: tl.constexpr, BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of each row, -1 for one that is no distribution; or that it is `wide`, its largest logit, its mass."""
    row = tl.program_id(0)
    groups = tl.arange(0, BLOCK_G)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place, temperature, top_p, min_p, k, greedy, filters = load_row(settings, slots, row, V, BY_SLOT, WORDS)
    logits += row.to(tl.int64) * stride
    maximum = tl.load(maxima + row * G + groups, groups < G, float("-inf"))
    best = tl.max(ordered(maximum), 0)
    top = base_of(value_of(best))
    is_wide = best != best
    token = tl.full((), -1, tl.int32)
    if is_finite(best):
        if greedy:
            token = _likeliest(logits, maximum, V, GROUP, BLOCK_G)
        else:
            drawn = uniform(place, tl.load(positions + row).to(tl.int64))
            mass = tl.load(masses + row * G + groups, groups < G, 0.0)
            if filters:
                share = mass * tl.exp((base_of(maximum) - top) / temperature)
                whole = tl.sum(share, 0)
                floor = tl.where(min_p > 0.0, top + temperature * tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
                bound = _bound(maximum, whole, share, floor, k, V, G, top_p, min_p, NUCLEUS, RANKED)
                found = tl.full((), MOST + 1, tl.int32)
                candidates += row * MOST
                indices += row * MOST
                if bound > float("-inf"):
                    found = _gather(
                        candidates, indices, group_ids + row * G, logits, maximum, bound, V, G, GROUP, BLOCK_G, TILE,
                        MOST,
                    )  # fmt: skip
                is_wide = (found > MOST) | (found == 0)
                if (is_wide == 0) & (k == V) & (min_p == 0.0):
                    # The candidates must hold the nucleus.
                    lowest = tl.full([_PIVOTS_AT_ONCE], -0x80000000, tl.int32)
                    held = tl.max(_reach(candidates, found, floor, top, temperature, lowest, False, TILE), 0)
                    is_wide = held < top_p * whole
                if is_wide == 0:
                    threshold = _least_kept(
                        candidates, found, floor, top, temperature, k, V, top_p, min_p, whole, TILE
                    )  # fmt: skip
                    at = _pick(candidates, found, threshold, floor, top, temperature, drawn, TILE)
                    token = tl.load(indices + at)
                tl.store(tops + row, top)
                tl.store(wholes + row, tl.sum(share.to(tl.float64), 0))
            else:
                token = _draw_any(logits, maximum, mass, groups, top, V, temperature, drawn, GROUP)
    tl.store(out + row, token.to(out.dtype.element_ty))
    tl.store(wide + row, is_wide.to(tl.int32))


class _Wide:
    """What the kernels tell each other of wide rows, L of P parts. Each is memory of its own: of parts of one, whether
    they are aligned would depend on L, and a kernel be compiled for either."""

    def __init__(self, rows: int, parts: int, listed: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.flags = empty(rows, dtype=torch.int32)
        self.tops = empty(rows, dtype=torch.float32)
        self.wholes = empty(rows, dtype=torch.float64)
        self.brackets = empty(rows, 2, dtype=torch.int32)
        self.above = empty(rows, parts, dtype=torch.float32)
        self.numbers = empty(rows, parts, dtype=torch.int32)
        self.kept = empty(rows, parts, dtype=torch.float32)
        self.counts = empty(rows, parts, dtype=torch.int32)
        self.lists = empty(rows, listed, dtype=torch.float32)


def sample(
    logits: Tensor, settings: Tensor, positions: Tensor, slots: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """[L, V] float32 -> [L] int64, or into `out` [L]: one token of each row; logits stay as they are.

    settings [L, 7] int32 as NUM_SETTINGS says, or of slots with `slots` [L]; positions [L] of the tokens to be sampled.
    Greedy rows take the first of their largest logits. -1 for a row with a NaN, or whose largest is infinite.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return out
    logits = logits.float()
    num_groups, num_parts = triton.cdiv(vocab_size, _GROUP), triton.cdiv(vocab_size, _PART)
    maxima, masses = (torch.empty(num_rows, num_groups, dtype=torch.float32, device=device) for _ in range(2))
    ids = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
    candidates = torch.empty(num_rows, _MAX_CANDIDATES, dtype=torch.float32, device=device)
    indices = torch.empty(num_rows, _MAX_CANDIDATES, dtype=torch.int32, device=device)
    here = _Wide(num_rows, num_parts, _LISTED if vocab_size <= _LARGE else 2 * _LISTED, device)
    asked = (settings, positions if slots is None else slots)
    row = (logits.stride(0), vocab_size)
    fixed: dict[str, Any] = {
        "BY_SLOT": slots is not None, "WORDS": NUM_SETTINGS, "PDL": launch.dependent(), **launch.options(8),
    }  # fmt: skip
    launch.on(_group_stats, (num_rows, triton.cdiv(num_groups, _GROUPS_AT_ONCE)))(
        maxima, masses, logits, *asked, *row, num_groups, GROUP=_GROUP, GROUPS=_GROUPS_AT_ONCE, **fixed
    )
    launch.on(_sample, (num_rows,))(
        out, here.flags, here.tops, here.wholes, logits, maxima, masses, ids, candidates, indices, *asked, positions,
        *row, num_groups, GROUP=_GROUP, BLOCK_G=launch.power_of_two(num_groups), TILE=_TILE, MOST=_MAX_CANDIDATES,
        NUCLEUS=_NUCLEUS_GROUPS, RANKED=_RANKED, **fixed,
    )  # fmt: skip
    _sample_wide(out, here, (logits, *asked), row, positions, num_parts, fixed)
    return out


def _sample_wide(
    out: Tensor, here: _Wide, asked: tuple[Tensor, ...], row: tuple[int, int], positions: Tensor, num_parts: int,
    fixed: dict[str, Any],
) -> None:  # fmt: skip
    """The tokens of the rows that are left."""
    num_rows = len(here.flags)
    each = (num_rows,)
    parts = (num_rows, max(1, min(num_parts, _PROGRAMS // num_rows)))
    listed = here.lists.shape[1]
    plan = {"LISTED": listed, "PART": _PART, "ROOM": min(_PART, listed // num_parts)}
    found = (here.brackets, here.flags, here.tops, here.wholes)
    of_parts = (here.above, here.numbers, here.kept, here.counts, here.lists)
    launch.on(place_bracket, each)(*found, *asked, *row, SAMPLE=_SAMPLE, **fixed)
    launch.on(scan_parts, parts)(
        *of_parts, *found, *asked, *row, num_parts, TILE=_PART_TILE, **plan, **(fixed | launch.options(1))
    )
    launch.on(finish_wide, each)(
        out, positions, *of_parts, *found, *asked, *row, num_parts, BLOCK_P=launch.power_of_two(num_parts), **plan,
        **(fixed | launch.options(16)),
    )  # fmt: skip
