"""`DraftTally`: counts what became of drafts. Knows no slots and no requests."""

import numpy as np

from pagemill.engine.scheduler.limits import IntArray
from pagemill.messages.stats import DraftCounts
from pagemill.messages.step import Int32Array


class DraftTally:
    """`max_drafts`: of a request in a step, as settings say; 0 where they say nothing of drafts."""

    def __init__(self, max_drafts: int = 0) -> None:
        self._num_drafts = 0
        self._num_tokens = 0
        self._accepted: IntArray = np.zeros(max_drafts, np.int64)
        """By place."""
        self.counts: DraftCounts | None = self._counted() if max_drafts else None
        """All so far; None where there is nothing to count."""

    def add(self, verified: Int32Array, counts: Int32Array | None) -> None:
        """[L] drafts that slots verified in a step, and [L] tokens that they got; None: one each."""
        some = verified > 0
        self._num_drafts += int(some.sum())
        self._num_tokens += int(verified.sum())
        most = int(verified.max(initial=0))
        if most > len(self._accepted):
            self._accepted = np.pad(self._accepted, (0, most - len(self._accepted)))
        if counts is not None:
            accepted = counts[some] - 1
            self._accepted += (accepted[:, None] > np.arange(len(self._accepted))).sum(axis=0)
        self.counts = self._counted()

    def _counted(self) -> DraftCounts:
        return DraftCounts(self._num_drafts, self._num_tokens, tuple(self._accepted.tolist()))
