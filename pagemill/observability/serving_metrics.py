"""`ServingMetrics`: the `vllm:*` metrics of one front end, under the names that dashboards and routers know.

Does not know where the figures come from: it is told of steps, tokens and ends, and asks for the engines' own figures
when somebody reads. Used from one thread.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pagemill.messages.metrics import FrontEndCounts, MetricsTotals
from pagemill.messages.stats import SchedulerStats
from pagemill.observability.engine_metrics import FINISH_REASONS, HISTOGRAMS, RESIDENCY_HISTOGRAMS, EngineMetrics
from pagemill.observability.hit_rate import RecentHits

GAUGES = {
    "num_requests_running": ("Requests in execution.", "num_running"),
    "num_requests_waiting": ("Requests that wait.", "num_waiting"),
    "kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1.", "kv_cache_usage"),
}
ENGINE_COUNTERS = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    "prefix_cache_hits": ("Prompt tokens found there.", "prefix_cache_hits"),
    "num_preemptions": ("Requests that lost their blocks and were computed again.", "num_preemptions"),
}
OWN_COUNTERS = {
    "prompt_tokens": ("Prompt tokens of completions that got a first token.", "num_prompt_tokens"),
    "generation_tokens": ("Generated tokens.", "num_generation_tokens"),
}
LABELS = ("model_name", "engine")

Engines = Callable[[], Mapping[int, SchedulerStats]]
"""The latest figures of each engine, by index. Never waits."""


class ServingMetrics(Collector):
    """Told by `AsyncLLM` what happens; `text` is the page that Prometheus reads."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        cache_config: Mapping[str, Any],
        engines: Engines,
        *,
        with_residency: bool = False,
    ) -> None:
        """`cache_config` become labels; `with_residency`: blocks are sampled."""
        self.prefix_hits = RecentHits()
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._cache_config = {name: str(value) for name, value in cache_config.items()}
        self._engines = engines
        self._histograms = HISTOGRAMS | (RESIDENCY_HISTOGRAMS if with_residency else {})
        self._of_engine: dict[int, EngineMetrics] = {}
        self._num_rejected = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def of_engine(self, index: int) -> EngineMetrics:
        """What is counted of the work of one engine."""
        found = self._of_engine.get(index)
        if found is None:
            found = self._of_engine[index] = EngineMetrics(self._max_model_len)
        return found

    def rejected(self) -> None:
        """A request was refused because too many wait."""
        self._num_rejected += 1

    def counts(self, taken_at_ns: int, *, asks: bool) -> FrontEndCounts:
        """All that this front end has counted, as a message."""
        engines = {index: metrics.counts() for index, metrics in self._of_engine.items()}
        return FrontEndCounts(taken_at_ns, asks, engines, self._num_rejected)

    def text_of(self, totals: MetricsTotals) -> bytes:
        """What all front ends of a server have counted, in the exposition format. Raises ValueError and KeyError for
        totals of another kind of server."""
        everything = ServingMetrics(
            self._model_name,
            self._max_model_len,
            self._cache_config,
            lambda: {index: totals.stats.get(index, SchedulerStats()) for index in self._engines()},
            with_residency=self._histograms.keys() != HISTOGRAMS.keys(),
        )
        everything._num_rejected = totals.num_rejected
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
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """Called for every scrape."""
        engines = self.engines()
        yield from self._gauges(engines)
        yield from self._counters(engines)
        for name, text in self._histograms.items():
            histograms = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for index in engines:
                (histogram,) = self.of_engine(index).histograms([name])
                histograms.add_metric(self._labels(index), histogram.buckets(), histogram.total)
            yield histograms

    def _gauges(self, engines: Mapping[int, SchedulerStats]) -> Iterator[Any]:
        for name, (text, field) in GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for index, stats in engines.items():
                gauge.add_metric(self._labels(index), float(getattr(stats, field)))
            yield gauge
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait: for capacity, or deferred for another reason.",
            labels=(*LABELS, "reason"),
        )
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=("engine", *self._cache_config))
        for index, stats in engines.items():
            # Whoever waits here waits for slots, tokens or blocks; nothing defers a request for another reason.
            waiting.add_metric((*self._labels(index), "capacity"), float(stats.num_waiting))
            waiting.add_metric((*self._labels(index), "deferred"), 0.0)
            info.add_metric((str(index), *self._cache_config.values()), 1.0)
        yield waiting
        yield info

    def _counters(self, engines: Mapping[int, SchedulerStats]) -> Iterator[Any]:
        for name, (text, field) in ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for index, stats in engines.items():
                counter.add_metric(self._labels(index), float(getattr(stats, field)))
            yield counter
        for name, (text, field) in OWN_COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for index in engines:
                counter.add_metric(self._labels(index), float(getattr(self.of_engine(index), field)))
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "Completions that ended, by reason.", labels=(*LABELS, "finished_reason")
        )
        for index in engines:
            for reason in FINISH_REASONS:
                ended.add_metric((*self._labels(index), reason), self.of_engine(index).num_ended[reason])
        yield ended
        refused = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused at a limit.", labels=("model_name", "reason")
        )
        refused.add_metric((self._model_name, "queue_full"), self._num_rejected)
        yield refused

    def _labels(self, index: int) -> tuple[str, str]:
        return self._model_name, str(index)
