"""`Histogram`: counts in buckets, cheap enough to be told of every token. Knows nothing about what it counts.

prometheus_client's own takes a lock and walks its buckets at each observation, which a thousand streams notice; this
one is used from one thread, and read by a collector.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from pagemill.messages.metrics import HistogramCounts


class Histogram:
    """Observations, by upper bounds that are part of their bucket. A last bucket has no bound."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of all observations."""

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several observations."""
        for value in values:
            self.observe(value)

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def counts(self) -> HistogramCounts:
        """A copy, as a message."""
        return HistogramCounts(list(self._counts), self.total)

    def restore(self, counts: HistogramCounts) -> None:
        """Become what a message says. Raises ValueError when it has another number of buckets."""
        if len(counts.counts) != len(self._counts):
            raise ValueError(f"{len(counts.counts)} buckets of a histogram that has {len(self._counts)}")
        self._counts = list(counts.counts)
        self.total = counts.total

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound as text, and how many observations do not exceed it, as Prometheus has it."""
        found = []
        running = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            running += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(running)))
        return found
