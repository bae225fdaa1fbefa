"""`DraftTally`: counts what became of drafts. Knows no slots and no requests."""

from collections import Counter

from pagemill.messages.stats import DraftCounts
from pagemill.messages.step import Int32Array


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
        got = [1] * len(verified) if counts is None else counts.tolist()
        # Few pairs differ, of however many slots.
        for (num_drafts, num_tokens), times in Counter(zip(verified.tolist(), got, strict=True)).items():
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
