"""`StepCosts`: how long a step takes by its number of tokens, learnt from steps that ran. Knows no clock, and nothing
of what a step computes.
"""

from bisect import bisect_left
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens that have an estimate of their own; between them it is interpolated."""
FIRST_KNOTS = 8
"""Up to which every number has one."""
FIXED_TOKENS = 4.0
"""What a step costs however many tokens it has, in tokens: a guess, for numbers that were not seen yet. It is a low one
for machines that wait for memory, so that a larger step is tried where much is won by it, and measured then."""
MEMORY = 256
"""Steps after which an estimate that no step has confirmed is forgotten."""
FIRST_MEMORY = 32
"""The same for an estimate of a single step, which something else may have slowed; twice as many each time that it is
forgotten, up to MEMORY."""
SLOWEST_RATE = 0.12
"""Of the difference between what was measured and what was expected, what an estimate takes over in the end."""


class StepCosts:
    """An estimate for each of KNOTS, which steps near it move: their mean at first, a moving one from the eighth on.
    A single slow step is cut to half as much again.

    Nearly every step is added and few are asked for: what was added is worked in by `seconds`, or when it is much."""

    def __init__(self) -> None:
        self._seconds = [knot + FIXED_TOKENS for knot in KNOTS]
        self._num_seen = [0] * len(KNOTS)
        """By knot; 0: nothing is known of it, or it was forgotten."""
        self._seen_at = [0] * len(KNOTS)
        self._memories = [FIRST_MEMORY] * len(KNOTS)
        """By knot: steps after which what one step said is forgotten."""
        self._num_steps = 0
        self._known: list[float] | None = None
        """[KNOTS] estimates that never fall, for `seconds`; None: to be made of those above."""

    @property
    def num_steps(self) -> int:
        """How many steps were measured."""
        return self._num_steps

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long. One of more tokens than the last knot says nothing."""
        if not 0 < num_tokens <= KNOTS[-1] or seconds <= 0:
            return
        upper = bisect_left(KNOTS, num_tokens)
        lower = upper if KNOTS[upper] == num_tokens else upper - 1
        share = 0.0 if lower == upper else (num_tokens - KNOTS[lower]) / (KNOTS[upper] - KNOTS[lower])
        near = ((lower, 1 - share), (upper, share)) if share else ((lower, 1.0),)
        if any(not self._is_known(knot) for knot, _ in near):
            self._fill()
        self._num_steps += 1
        self._known = None
        expected = sum(part * self._seconds[knot] for knot, part in near)
        num_seen = min(self._num_seen[knot] for knot, _ in near)
        if num_seen > 1:
            seconds = min(max(seconds, expected / 1.5), expected * 1.5)
        change = max(1 / (num_seen + 1), SLOWEST_RATE) * (seconds - expected)
        norm = sum(part * part for _, part in near)
        for knot, part in near:
            self._seconds[knot] = max(self._seconds[knot] + change * part / norm, 1e-9)
            if part > 0.25:
                self._num_seen[knot] += 1
                self._seen_at[knot] = self._num_steps

    def seconds(self, fewest: int, most: int) -> list[float]:
        """[most - fewest + 1] of steps with `fewest` > 0 to `most` tokens; never less for more of them. In some unit,
        as long as nothing was measured."""
        known = self._estimates()
        if most <= FIRST_KNOTS:  # which follow one another
            return known[fewest - 1 : most]
        upper = bisect_left(KNOTS, fewest)
        found = []
        for count in range(fewest, min(most, KNOTS[-1]) + 1):
            upper += KNOTS[upper] < count
            if KNOTS[upper] == count:
                found.append(known[upper])
                continue
            share = (count - KNOTS[upper - 1]) / (KNOTS[upper] - KNOTS[upper - 1])
            found.append(known[upper - 1] + share * (known[upper] - known[upper - 1]))
        per_token = known[-1] / (KNOTS[-1] + FIXED_TOKENS)
        found += [(count + FIXED_TOKENS) * per_token for count in range(max(fewest, KNOTS[-1] + 1), most + 1)]
        return found

    def array(self, fewest: int, most: int) -> FloatArray:
        """`seconds`, which is faster for few numbers, as an array."""
        known = self._estimates()
        counts = np.arange(fewest, most + 1, dtype=np.float64)
        per_token = known[-1] / (KNOTS[-1] + FIXED_TOKENS)
        found: FloatArray = np.where(
            counts > KNOTS[-1], (counts + FIXED_TOKENS) * per_token, np.interp(counts, KNOTS, known)
        )
        return found

    def _estimates(self) -> list[float]:
        """By knot, none less than the one before."""
        if self._known is None:
            self._fill()
            self._known = list(accumulate(self._seconds, max))
        return self._known

    def _is_known(self, knot: int) -> bool:
        num_seen = self._num_seen[knot]
        memory = MEMORY if num_seen > 1 else self._memories[knot]
        return num_seen > 0 and self._num_steps - self._seen_at[knot] < memory

    def _remembered(self) -> list[int]:
        """Knots of which something is known; the others forget what was."""
        known = []
        for knot, num_seen in enumerate(self._num_seen):
            if not num_seen:
                continue
            if self._is_known(knot):
                known.append(knot)
                continue
            self._num_seen[knot] = 0
            if num_seen == 1:
                self._memories[knot] = min(2 * self._memories[knot], MEMORY)
        return known

    def _fill(self) -> None:
        """Estimates for knots of which nothing is known: between two that are known on the line, elsewhere from the
        nearest one by FIXED_TOKENS."""
        seconds = self._seconds
        known = self._remembered()
        if not known:
            return
        for lower, upper in pairwise(known):
            slope = (seconds[upper] - seconds[lower]) / (KNOTS[upper] - KNOTS[lower])
            for knot in range(lower + 1, upper):
                seconds[knot] = seconds[lower] + slope * (KNOTS[knot] - KNOTS[lower])
        for end, outside in ((known[0], range(known[0])), (known[-1], range(known[-1] + 1, len(KNOTS)))):
            scale = seconds[end] / (KNOTS[end] + FIXED_TOKENS)
            for knot in outside:
                seconds[knot] = scale * (KNOTS[knot] + FIXED_TOKENS)
