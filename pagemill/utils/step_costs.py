"""`StepCosts`: how long a step takes by its number of tokens, learnt from steps that ran. Knows no clock, and nothing
of what a step computes.
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens that have an estimate of their own; between them it is interpolated."""
FIXED_TOKENS = 4.0
"""What a step costs however many tokens it has, in tokens: a guess, for numbers that were not seen yet. It is a low one
for machines that wait for memory, so that a larger step is tried where much is won by it, and measured then."""
MEMORY = 256
"""Steps after which an estimate that no step has confirmed is forgotten."""
SLOWEST_RATE = 0.12
"""Of the difference between what was measured and what was expected, what an estimate takes over in the end."""


class StepCosts:
    """An estimate for each of KNOTS, which steps near it move: their mean at first, a moving one from the eighth on.
    A single slow step is cut to half as much again."""

    def __init__(self) -> None:
        self._knots: FloatArray = np.array(KNOTS, np.float64)
        self._seconds: FloatArray = self._knots + FIXED_TOKENS
        self._num_seen = np.zeros(len(KNOTS), np.int64)
        """By knot; 0: nothing is known of it, or it was forgotten."""
        self._seen_at = np.zeros(len(KNOTS), np.int64)
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """That were measured."""
        return self._num_steps

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long. One of more tokens than the last knot says nothing."""
        if not 0 < num_tokens <= KNOTS[-1] or seconds <= 0:
            return
        self._num_steps += 1
        upper = int(np.searchsorted(self._knots, num_tokens))
        lower = upper if KNOTS[upper] == num_tokens else upper - 1
        share = 0.0 if lower == upper else (num_tokens - KNOTS[lower]) / (KNOTS[upper] - KNOTS[lower])
        expected = (1 - share) * self._seconds[lower] + share * self._seconds[upper]
        near = [(knot, part) for knot, part in ((lower, 1 - share), (upper, share)) if part > 0]
        num_seen = min(int(self._num_seen[knot]) for knot, _ in near)
        if num_seen > 1:
            seconds = min(max(seconds, expected / 1.5), expected * 1.5)
        change = max(1 / (num_seen + 1), SLOWEST_RATE) * (seconds - expected)
        norm = sum(part * part for _, part in near)
        for knot, part in near:
            self._seconds[knot] = max(self._seconds[knot] + change * part / norm, 1e-9)
            if part > 0.25:
                self._num_seen[knot] += 1
                self._seen_at[knot] = self._num_steps
        self._num_seen[self._num_steps - self._seen_at >= MEMORY] = 0
        self._fill()

    def seconds(self, num_tokens: npt.ArrayLike) -> FloatArray:
        """Of steps with so many tokens each; never less for more of them. In some unit, as long as nothing was
        measured."""
        asked = np.asarray(num_tokens, np.float64)
        known = np.maximum.accumulate(self._seconds)
        beyond = np.maximum(asked - self._knots[-1], 0) / (self._knots[-1] + FIXED_TOKENS)
        found: FloatArray = np.interp(asked, self._knots, known) * (1 + beyond)
        return found

    def _fill(self) -> None:
        """Estimates for knots of which nothing is known: between two that are known on the line, elsewhere from the
        nearest one by FIXED_TOKENS."""
        known = np.flatnonzero(self._num_seen)
        if not len(known):
            return
        knots = self._knots
        first, last = known[0], known[-1]
        filled = np.interp(knots, knots[known], self._seconds[known])
        for end, outside in ((first, slice(0, first)), (last, slice(last + 1, None))):
            scale = self._seconds[end] / (knots[end] + FIXED_TOKENS)
            filled[outside] = scale * (knots[outside] + FIXED_TOKENS)
        self._seconds = filled
