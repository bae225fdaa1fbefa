"""`families`: the `vllm:*` metrics of a front end as prometheus_client has them. Knows their names; counts nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from pagemill.messages.stats import SchedulerStats
from pagemill.observability.engine_metrics import FINISH_REASONS
from pagemill.observability.serving_metrics import ServingMetrics

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
DRAFT_COUNTERS = {
    "spec_decode_num_drafts": ("Times that a request had drafts verified.", "num_drafts"),
    "spec_decode_num_draft_tokens": ("Drafts that were verified.", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Drafts that were accepted.", "num_accepted_tokens"),
}
OWN_COUNTERS = {
    "prompt_tokens": ("Prompt tokens of completions that got a first token.", "num_prompt_tokens"),
    "generation_tokens": ("Generated tokens.", "num_generation_tokens"),
}
LABELS = ("model_name", "engine")


def families(metrics: ServingMetrics) -> Iterator[Any]:
    """All of them, with what is known now."""
    engines = metrics.engines()
    yield from _gauges(metrics, engines)
    yield from _counters(metrics, engines)
    for name, text in metrics.histograms.items():
        histograms = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for index in engines:
            (histogram,) = metrics.of_engine(index).histograms([name])
            histograms.add_metric(_labels(metrics, index), histogram.buckets(), histogram.total)
        yield histograms


def _gauges(metrics: ServingMetrics, engines: Mapping[int, SchedulerStats]) -> Iterator[Any]:
    yield from _plain(GaugeMetricFamily, GAUGES, metrics, engines)
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait: for capacity, or deferred for another reason.",
        labels=(*LABELS, "reason"),
    )
    info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=("engine", *metrics.cache_config))
    for index, stats in engines.items():
        # Whoever waits here waits for slots, tokens or blocks; nothing defers a request for another reason.
        waiting.add_metric((*_labels(metrics, index), "capacity"), float(stats.num_waiting))
        waiting.add_metric((*_labels(metrics, index), "deferred"), 0.0)
        info.add_metric((str(index), *metrics.cache_config.values()), 1.0)
    yield waiting
    yield info


def _counters(metrics: ServingMetrics, engines: Mapping[int, SchedulerStats]) -> Iterator[Any]:
    yield from _plain(CounterMetricFamily, ENGINE_COUNTERS, metrics, engines)
    yield from _plain(
        CounterMetricFamily, OWN_COUNTERS, metrics, {index: metrics.of_engine(index) for index in engines}
    )
    ended = CounterMetricFamily(
        "vllm:request_success", "Completions that ended, by reason.", labels=(*LABELS, "finished_reason")
    )
    for index in engines:
        for reason in FINISH_REASONS:
            ended.add_metric((*_labels(metrics, index), reason), metrics.of_engine(index).num_ended[reason])
    yield ended
    yield from _of_drafts(metrics, engines)
    refused = CounterMetricFamily(
        "vllm:admission_rejections", "Requests refused at a limit.", labels=("model_name", "reason")
    )
    for reason, count in metrics.num_rejected.items():
        refused.add_metric((metrics.model_name, reason), count)
    yield refused


def _of_drafts(metrics: ServingMetrics, engines: Mapping[int, SchedulerStats]) -> Iterator[Any]:
    """Nothing where no engine has drafts."""
    counts = {index: stats.drafts for index, stats in engines.items() if stats.drafts is not None}
    if not counts:
        return
    yield from _plain(CounterMetricFamily, DRAFT_COUNTERS, metrics, counts)
    by_place = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were accepted, by their place among those of one request in one step.",
        labels=(*LABELS, "position"),
    )
    for index, of_engine in counts.items():
        for place, count in enumerate(of_engine.num_accepted_per_pos):
            by_place.add_metric((*_labels(metrics, index), str(place)), count)
    yield by_place


def _plain(
    family: Any, names: Mapping[str, tuple[str, str]], metrics: ServingMetrics, sources: Mapping[int, Any]
) -> Iterator[Any]:
    """Of each name (text, field) the field of every engine's source."""
    for name, (text, field) in names.items():
        found = family(f"vllm:{name}", text, labels=LABELS)
        for index, source in sources.items():
            found.add_metric(_labels(metrics, index), float(getattr(source, field)))
        yield found


def _labels(metrics: ServingMetrics, index: int) -> tuple[str, str]:
    return metrics.model_name, str(index)
