"""`ServingMetrics`: the `vllm:*` metrics of one front end, under the names that dashboards and routers know.

Does not know where the figures come from: it is told of steps, tokens and ends, and asks for the engines' own figures
when somebody reads. Used from one thread.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pagemill.messages.metrics import FrontEndCounts, MetricsTotals
from pagemill.messages.stats import SchedulerStats
from pagemill.observability.engine_metrics import HISTOGRAMS, RESIDENCY_HISTOGRAMS, EngineMetrics
from pagemill.observability.hit_rate import RecentHits

QUEUE_FULL = "queue_full"
QUEUED_TOKENS = "queued_tokens"
REJECTION_REASONS = (QUEUE_FULL, QUEUED_TOKENS)

Engines = Callable[[], Mapping[int, SchedulerStats]]
"""The latest figures of each engine, by index. Never waits."""


class ServingMetrics:
    """Told by `AsyncLLM` what happens; `text` is the page that Prometheus reads."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        cache_config: Mapping[str, Any],
        engines: Engines,
        *,
        with_residency: bool = False,
        enabled: bool = True,
    ) -> None:
        """`cache_config` become labels; `with_residency`: blocks are sampled; not `enabled`: there are no metrics."""
        self.enabled = enabled
        self.prefix_hits = RecentHits()
        self.model_name = model_name
        self._max_model_len = max_model_len
        self.cache_config = {name: str(value) for name, value in cache_config.items()}
        self._engines = engines
        self.histograms = HISTOGRAMS | (RESIDENCY_HISTOGRAMS if with_residency else {})
        self._of_engine: dict[int, EngineMetrics] = {}
        self.num_rejected = dict.fromkeys(REJECTION_REASONS, 0)

    def of_engine(self, index: int) -> EngineMetrics:
        """What is counted of the work of one engine."""
        found = self._of_engine.get(index)
        if found is None:
            found = self._of_engine[index] = EngineMetrics(self._max_model_len)
        return found

    def rejected(self, reason: str = QUEUE_FULL) -> None:
        """A request was refused at a limit; the reason is one of REJECTION_REASONS."""
        self.num_rejected[reason] += 1

    def counts(self, taken_at_ns: int, *, asks: bool) -> FrontEndCounts:
        """All that this front end has counted, as a message."""
        engines = {index: metrics.counts() for index, metrics in self._of_engine.items()}
        return FrontEndCounts(taken_at_ns, asks, engines, dict(self.num_rejected))

    def text_of(self, totals: MetricsTotals) -> bytes:
        """What all front ends of a server have counted, in the exposition format. Raises ValueError and KeyError for
        totals of another kind of server."""
        everything = ServingMetrics(
            self.model_name,
            self._max_model_len,
            self.cache_config,
            lambda: {index: totals.stats.get(index, SchedulerStats()) for index in self._engines()},
            with_residency=self.histograms.keys() != HISTOGRAMS.keys(),
            enabled=self.enabled,
        )
        everything.num_rejected |= totals.num_rejected
        for index, counts in totals.engines.items():
            everything.of_engine(index).restore(counts)
        return everything.text()

    def engines(self) -> dict[int, SchedulerStats]:
        """The latest figures of each engine, by index."""
        return dict(sorted(self._engines().items()))

    def total(self, name: str) -> int:
        """A count of `EngineMetrics`, of all engines together."""
        return sum(getattr(metrics, name) for metrics in self._of_engine.values())

    def text(self) -> bytes:
        """Everything in the exposition format."""
        from prometheus_client import CollectorRegistry, generate_latest  # deferred: a start without it is faster

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Any]:
        """Everything as prometheus_client's families of samples."""
        if not self.enabled:
            return iter(())
        from pagemill.observability.metric_families import families  # deferred, as above

        return families(self)
