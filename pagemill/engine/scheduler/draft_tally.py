"""`DraftTally`: counts what became of drafts. Knows no slots and no requests."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from pagemill.messages.stats import DraftCounts
from pagemill.messages.step import Int32Array

FEW_SLOTS = 96
"""For which lists are faster than arrays."""


class DraftTally:
    """`max_drafts`: of a request in a step, as settings say; 0 where they say nothing of drafts."""

    def __init__(self, max_drafts: int = 0) -> None:
        self._num_drafts = 0
        self._num_tokens = 0
        self._accepted = [0] * max_drafts
        """By place."""
        self.counts: DraftCounts | None = self._counted() if max_drafts else None
        """All so far; None where there is nothing to count."""

    def add(self, verified: Int32Array, counts: Int32Array | None) -> None:
        """[L] drafts that slots verified in a step, and [L] tokens that they got; None: one each."""
        # Few pairs differ, of however many slots.
        for (num_drafts, num_tokens), times in _pairs(verified, counts):
            if num_drafts <= 0:
                continue
            self._num_drafts += times
            self._num_tokens += num_drafts * times
            self._accepted += [0] * (num_drafts - len(self._accepted))
            for place in range(min(num_tokens - 1, num_drafts)):
                self._accepted[place] += times
        self.counts = self._counted()

    def _counted(self) -> DraftCounts:
        return DraftCounts(self._num_drafts, self._num_tokens, tuple(self._accepted))


def _pairs(verified: Int32Array, counts: Int32Array | None) -> Iterable[tuple[tuple[int, int], int]]:
    """[L], [L] -> the pairs of both, and how often each is there; those of no drafts may be left out."""
    if counts is None:
        return Counter((num_drafts, 1) for num_drafts in verified.tolist()).items()
    if len(verified) <= FEW_SLOTS:
        return Counter(zip(verified.tolist(), counts.tolist(), strict=True)).items()
    some = verified > 0
    width = int(verified.max()) + 2  # tokens are one more than drafts at most
    times = np.bincount(verified[some] * width + counts[some])
    there = np.flatnonzero(times)
    return zip((divmod(code, width) for code in there.tolist()), times[there].tolist(), strict=True)
