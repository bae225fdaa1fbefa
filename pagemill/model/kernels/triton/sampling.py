"""Sampling without sorting: temperature, min-p, top-k, top-p and one draw per row. Knows no request.

A row is read in parts of 4,096 logits, each by a program, once where few logits can be kept and up to three times
where many can:

1. `_bound` looks at a sample of the row for a logit that less than a few thousand exceed, and for pivots.
2. `_scan` finds each part's maximum and mass, and lists what reaches that bound, in order.
3. `reach` (sampling_wide.py): where the list does not hold all that may be kept, the mass above each pivot.
4. `list_bracket` (there): lists what lies between the two pivots that the least kept logit must be between.
5. `finish` (sampling_finish.py): the least kept logit, searched bit by bit in the list; the part, and the token, where
   the cumulative mass passes the random number.

What the sample says is checked, and rows for which it was wrong are read in full. Thresholds, ties and noise are those
of worker/sampling; no atomics, so runs repeat. Random numbers: philox.py there.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.argmax import ordered
from pagemill.model.kernels.triton.sampling_finish import finish
from pagemill.model.kernels.triton.sampling_rows import FINITE_KEY, floor_key, largest_key, load_logits, load_row
from pagemill.model.kernels.triton.sampling_wide import list_bracket, reach

_PART = 4096
_SAMPLE = 2048
"""Logits of a row that are looked at first."""
_PIVOT_SAMPLE = 1024
"""Of these, for pivots, of which each needs its own search."""
_PIVOTS = 16
_HEAD = 24
"""Without top-k and min-p, what exceeds this many of the sample is listed first."""
_ROOM = 768
"""Logits that are listed of a part."""
_LISTED = 16384
"""Of a row."""
_FEW = 2048
"""Listed logits that take less work."""
_PROGRAMS = 1024
"""Of a kernel, where parts can share one."""
NUM_SETTINGS = 7
"""int32 words of a row of settings: temperature, top_p, min_p (float32), top_k, greedy, seed (low, high)."""

_NEAR_BITS = tl.constexpr(20)
"""Of the key of a bound or pivot: sign, exponent and 11 of the mantissa."""


@triton.jit
def _sampled(logits, V, SAMPLE: tl.constexpr):
    """Keys of SAMPLE logits from all over the row, 8 neighbours at a time; of a short row, of all. The lowest for those
    that are none."""
    lanes = tl.arange(0, SAMPLE)
    spread = (lanes // 8 * V // (SAMPLE // 8)) // 8 * 8 + lanes % 8
    cols = tl.where(V <= SAMPLE, lanes, spread)
    value = load_logits(logits + cols, cols < V)
    return ordered(value), value


@triton.jit
def _pivots(places, logits, V, SAMPLE: tl.constexpr, PIVOTS: tl.constexpr):
    """Write keys, descending, between which there are about equally many logits."""
    numbers = tl.arange(0, PIVOTS)
    keys, _ = _sampled(logits, V, SAMPLE)
    ranks = tl.maximum((numbers + 1) * tl.minimum(V, SAMPLE) // (PIVOTS + 1), 1)
    found = tl.full([PIVOTS], -0x80000000, tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(_NEAR_BITS):
        trial = found + step
        reached = tl.sum((keys[None, :] >= trial.to(tl.int32)[:, None]).to(tl.int32), 1)
        found = tl.where(reached >= ranks, trial, found)
        step = step // 2
    tl.store(places + numbers, tl.maximum(found.to(tl.int32), FINITE_KEY))


@triton.jit
def _bound(
    bounds, pivots, logits, settings, slots, stride, V,
    SAMPLE: tl.constexpr, PIVOT_SAMPLE: tl.constexpr, PIVOTS: tl.constexpr, HEAD: tl.constexpr,
    BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Key of a logit that is not above what is looked for: the k-th largest, the least that min-p keeps, or the HEAD
    most likely of the sample; and pivots for top-p."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _, temperature, top_p, min_p, limit, _, filters = load_row(settings, slots, row, V, BY_SLOT, WORDS)
    if filters:
        logits += row.to(tl.int64) * stride
        keys, value = _sampled(logits, V, SAMPLE)
        if (min_p > 0.0) & (limit == V):
            top = tl.max(value, 0)
            bound = floor_key(tl.where(top == float("-inf"), 0.0, top), temperature, min_p)
        else:
            # As many of the sample as hold the k largest of the row but once in a billion rows.
            expected = limit.to(tl.float32) * tl.minimum(V, SAMPLE) / V
            wanted = tl.where(limit < V, expected + 6.0 * tl.sqrt(expected) + 6.0, HEAD * 1.0)
            bound = largest_key(keys, tl.full([SAMPLE], 1.0, tl.float32), wanted, _NEAR_BITS)
        tl.store(bounds + row, tl.maximum(bound, FINITE_KEY))
        if (top_p < 1.0) & (limit == V):
            _pivots(pivots + row * PIVOTS, logits, V, PIVOT_SAMPLE, PIVOTS)


@triton.jit
def _scan_part(
    tops, masses, heads, counts, lists, logits, part, temperature, bound, greedy, filters, V,
    PART: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, PART)
    cols = part * PART + lanes
    value = load_logits(logits + cols, cols < V)
    top = tl.max(value, 0)
    tl.store(tops + part, top)
    if greedy:
        tl.store(counts + part, tl.min(tl.where(value == top, cols, V - 1), 0))
    else:
        # Where all of a part is masked, minus infinity less itself would be NaN.
        weight = tl.exp((value - tl.where(top == float("-inf"), 0.0, top)) / temperature)
        tl.store(masses + part, tl.sum(weight.to(tl.float64), 0))
        if filters:
            listed = (ordered(value) >= bound) & (cols < V)
            tl.store(heads + part, tl.sum(tl.where(listed, weight, 0.0).to(tl.float64), 0))
            rank = tl.cumsum(listed.to(tl.int32), 0) - 1
            tl.store(lists + part * ROOM + rank, value, listed & (rank < ROOM))
            tl.store(counts + part, tl.sum(listed.to(tl.int32), 0))


@triton.jit
def _scan(
    tops, masses, heads, counts, lists, bounds, logits, settings, slots, stride, V, P,
    PART: tl.constexpr, ROOM: tl.constexpr, BY_SLOT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each part: its maximum; where it is first, for greedy rows; the mass of all, and of what reaches the bound,
    beside the maximum; how many reach it, and the first ROOM of these."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _, temperature, _, _, _, greedy, filters = load_row(settings, slots, row, V, BY_SLOT, WORDS)
    bound = tl.load(bounds + row)
    logits += row.to(tl.int64) * stride
    lists += row.to(tl.int64) * P * ROOM
    for part in range(tl.program_id(1), P, tl.num_programs(1)):
        _scan_part(
            tops + row * P, masses + row * P, heads + row * P, counts + row * P, lists, logits, part, temperature,
            bound, greedy, filters, V, PART, ROOM,
        )  # fmt: skip


class _Scratch:
    """What the kernels tell each other of L rows of P parts."""

    def __init__(self, rows: int, parts: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.tops = empty(rows, parts, dtype=torch.float32)
        self.masses = empty(2, rows, parts, dtype=torch.float64)
        """Of all, and of what reaches the bound."""
        self.counts = empty(2, rows, parts, dtype=torch.int32)
        """Listed at first, and later."""
        self.lists = empty(rows, parts, _ROOM, dtype=torch.float32)
        self.keys = empty(rows, 1 + _PIVOTS, dtype=torch.int32)
        self.reached = empty(rows, parts, _PIVOTS, dtype=torch.float32)


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
    num_parts = triton.cdiv(vocab_size, _PART)
    # Programs that find nothing to do cost time, too.
    grid = (num_rows, max(1, min(num_parts, _PROGRAMS // num_rows)))
    here = _Scratch(num_rows, num_parts, logits.device)
    bounds, pivots = here.keys.view(-1)[:num_rows], here.keys.view(-1)[num_rows:]
    (masses, heads), (counts, later_counts) = here.masses, here.counts
    fixed: dict[str, Any] = {
        "BY_SLOT": slots is not None, "WORDS": NUM_SETTINGS, "PDL": launch.dependent(), **launch.options(8),
    }  # fmt: skip
    sizes: dict[str, Any] = {"PART": _PART, "ROOM": _ROOM}
    asked = (settings, positions if slots is None else slots)
    row = (logits.stride(0), vocab_size)
    launch.on(_bound, (num_rows,))(
        bounds, pivots, logits, *asked, *row,
        SAMPLE=_SAMPLE, PIVOT_SAMPLE=_PIVOT_SAMPLE, PIVOTS=_PIVOTS, HEAD=_HEAD, **fixed,
    )  # fmt: skip
    launch.on(_scan, grid)(
        here.tops, masses, heads, counts, here.lists, bounds, logits, *asked, *row, num_parts, **sizes, **fixed
    )
    known = (here.tops, masses, heads, counts)
    plan = {"PIVOTS": _PIVOTS, "LISTED": _LISTED, "BLOCK_P": launch.power_of_two(num_parts)}
    launch.on(reach, grid)(
        here.reached, *known, bounds, pivots, logits, *asked, *row, num_parts, **plan, **sizes, **fixed
    )
    launch.on(list_bracket, grid)(
        later_counts, here.lists, *known, here.reached, bounds, pivots, logits, *asked, *row, num_parts,
        **plan, **sizes, **fixed,
    )  # fmt: skip
    launch.on(finish, (num_rows,))(
        out, *known, later_counts, here.lists, here.reached, bounds, pivots, logits, *asked, positions, *row, num_parts,
        FEW=_FEW, **plan, **sizes, **(fixed | launch.options(16)),
    )  # fmt: skip
    return out
