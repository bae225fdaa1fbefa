"""`MetricsPool`: what several front ends have counted, added up, so that each can answer for all.

Does not know how counts arrive or totals travel.
"""

import operator
import threading
from collections.abc import Callable, Iterable, Mapping

from pagemill.log import get_logger
from pagemill.messages.fleet import EngineDown, EngineLoadReport, FleetEvent
from pagemill.messages.metrics import EngineCounts, FrontEndCounts, HistogramCounts, MetricsTotals
from pagemill.messages.stats import SchedulerStats

logger = get_logger(__name__)


class MetricsPool:
    """Latest counts of each front end, and what its dead predecessors had counted. From any thread.

    Totals only grow, and those that are published answer a question that was asked before: who shows them shows
    nothing that is less than what another front end has shown earlier. An engine's own figures come from its pulse, so
    that there is one source of them.
    """

    def __init__(self, num_engines: int, publish: Callable[[MetricsTotals], None]) -> None:
        """`publish` tells all front ends; it must not block."""
        self._num_engines = num_engines
        self._publish = publish
        self._lock = threading.Lock()
        self._latest: dict[int, FrontEndCounts] = {}
        self._lost: dict[int, FrontEndCounts] = {}
        self._stats: dict[int, SchedulerStats] = {}

    def take(self, index: int, counts: FrontEndCounts) -> None:
        """A front end says what it has counted so far."""
        with self._lock:
            if not all(0 <= engine < self._num_engines for engine in counts.engines):
                logger.error("dropped the counts of api server %d: of engines that do not exist", index)
                return
            known = self._latest.get(index) or self._lost.get(index)
            if known is not None and not _are_alike(known, counts):
                logger.error("dropped the counts of api server %d: its histograms have other buckets", index)
                return
            self._latest[index] = counts
            if counts.asks:
                self._publish(self._totals())

    def lost(self, index: int) -> None:
        """A front end died; another one in its place begins at zero."""
        with self._lock:
            latest = self._latest.pop(index, None)
            if latest is not None:
                lost = self._lost.get(index)
                self._lost[index] = latest if lost is None else _sum_of_two(lost, latest)

    def note(self, event: FleetEvent) -> None:
        """Something became known of an engine."""
        with self._lock:
            match event:
                case EngineLoadReport():
                    self._stats[event.index] = event.stats
                case EngineDown():
                    self._stats.pop(event.index, None)
                case _:
                    pass

    def totals(self) -> MetricsTotals:
        """The sums as of now."""
        with self._lock:
            return self._totals()

    def _totals(self) -> MetricsTotals:
        # Always in the same order, and the dead with their successor: sums of floats must not shrink by a rounding.
        parts = []
        for index in sorted(self._latest.keys() | self._lost.keys()):
            lost = self._lost.get(index)
            latest = self._latest.get(index)
            parts += [_sum_of_two(lost, latest)] if lost and latest else [part for part in (lost, latest) if part]
        return MetricsTotals(
            engines=_sum_engines(part.engines for part in parts),
            num_rejected=_sum_by_name(part.num_rejected for part in parts),
            stats=dict(self._stats),
            included={index: counts.taken_at_ns for index, counts in self._latest.items()},
        )


def _are_alike(one: FrontEndCounts, other: FrontEndCounts) -> bool:
    """Whether histograms of one name have as many buckets."""
    sizes: dict[str, int] = {}
    histograms = (
        item for counts in (one, other) for engine in counts.engines.values() for item in engine.histograms.items()
    )
    return all(sizes.setdefault(name, len(histogram.counts)) == len(histogram.counts) for name, histogram in histograms)


def _sum_of_two(one: FrontEndCounts, other: FrontEndCounts) -> FrontEndCounts:
    engines = _sum_engines((one.engines, other.engines))
    return FrontEndCounts(other.taken_at_ns, False, engines, _sum_by_name((one.num_rejected, other.num_rejected)))


def _sum_by_name(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            found[name] = found.get(name, 0) + count
    return found


def _sum_engines(parts: Iterable[Mapping[int, EngineCounts]]) -> dict[int, EngineCounts]:
    found: dict[int, EngineCounts] = {}
    for part in parts:
        for index, counts in part.items():
            known = found.get(index)
            found[index] = counts if known is None else _sum_counts(known, counts)
    return found


def _sum_counts(one: EngineCounts, other: EngineCounts) -> EngineCounts:
    histograms = dict(one.histograms)
    for name, histogram in other.histograms.items():
        known = histograms.get(name)
        if known is not None:
            sums = list(map(operator.add, known.counts, histogram.counts))
            histogram = HistogramCounts(sums, known.total + histogram.total)
        histograms[name] = histogram
    counters = _sum_by_name((one.counters, other.counters))
    return EngineCounts(counters, _sum_by_name((one.ended, other.ended)), histograms)
