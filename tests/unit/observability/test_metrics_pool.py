"""Counts of several front ends become one page; those of the dead stay."""

import msgspec
import pytest

from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import EngineDown, EngineLoadReport, EngineUp
from pagemill.messages.metrics import MAX_BUCKETS, EngineCounts, FrontEndCounts, HistogramCounts, MetricsTotals
from pagemill.messages.stats import SchedulerStats
from pagemill.observability.metrics_pool import MetricsPool
from pagemill.observability.serving_metrics import ServingMetrics
from tests.fakes.wire_metrics import wire_values


def front_end(tokens, seconds=(), engine=0, rejected=0):
    metrics = ServingMetrics("m", 100, {}, lambda: {0: SchedulerStats(), 1: SchedulerStats()})
    metrics.of_engine(engine).num_generation_tokens += tokens
    metrics.of_engine(engine).num_ended["stop"] += 1
    metrics.of_engine(engine).e2e_request_latency_seconds.observe_all(seconds)
    for _ in range(rejected):
        metrics.rejected()
    return metrics


class Pool(MetricsPool):
    def __init__(self, num_engines=2):
        self.published = []
        super().__init__(num_engines, self.published.append)
        self.time = 0

    def hear(self, index, metrics, asks=False):
        self.time += 1
        wire = msgspec.msgpack.encode(metrics.counts(self.time, asks=asks))
        self.take(index, msgspec.msgpack.decode(wire, type=FrontEndCounts))

    def values(self, engine="0"):
        totals = msgspec.msgpack.decode(msgspec.msgpack.encode(self.totals()), type=MetricsTotals)
        return wire_values(front_end(1000).text_of(totals), engine)


def test_counts_and_histograms_are_added_per_engine():
    pool = Pool()
    pool.hear(0, front_end(5, [0.25, 3.0], rejected=1))
    pool.hear(1, front_end(7, [1.0], rejected=2))
    pool.hear(2, front_end(11, engine=1))
    first, second = pool.values(), pool.values("1")
    assert (first["vllm:generation_tokens_total"], second["vllm:generation_tokens_total"]) == (12, 11)
    assert first["vllm:request_success_total{finished_reason=stop}"] == 2
    assert first["vllm:admission_rejections_total{reason=queue_full}"] == 3
    assert first["vllm:e2e_request_latency_seconds_count"] == 3
    assert first["vllm:e2e_request_latency_seconds_sum"] == 4.25
    assert first["vllm:e2e_request_latency_seconds_bucket{le=1.0}"] == 2
    assert second["vllm:e2e_request_latency_seconds_count"] == 0


def test_later_counts_replace_earlier_ones():
    pool = Pool()
    pool.hear(0, front_end(5))
    pool.hear(0, front_end(8))
    assert pool.values()["vllm:generation_tokens_total"] == 8


def test_the_dead_are_a_base_however_often_one_dies():
    pool = Pool()
    pool.hear(1, front_end(5, [0.1], rejected=1))
    for _ in range(2):
        pool.lost(1)
        assert 1 not in pool.totals().included
        pool.hear(1, front_end(10, [0.2], rejected=1))
    pool.lost(0)  # it never said anything
    values = pool.values()
    assert values["vllm:generation_tokens_total"] == 25
    assert values["vllm:e2e_request_latency_seconds_count"] == 3
    assert values["vllm:admission_rejections_total{reason=queue_full}"] == 3


def test_sums_do_not_shrink_when_one_dies():
    """0.1 + 0.2 + 0.3 depends on the order."""
    pool = Pool()
    for index, seconds in enumerate((0.1, 0.2, 0.3)):
        pool.hear(index, front_end(1, [seconds]))
    for index in (2, 0, 1, 2):
        before = pool.values()["vllm:e2e_request_latency_seconds_sum"]
        pool.lost(index)
        assert pool.values()["vllm:e2e_request_latency_seconds_sum"] == before
        pool.hear(index, front_end(0))
        assert pool.values()["vllm:e2e_request_latency_seconds_sum"] == before


def test_totals_are_published_for_who_asks():
    pool = Pool()
    pool.hear(0, front_end(5))
    assert not pool.published
    pool.hear(1, front_end(5), asks=True)
    (totals,) = pool.published
    assert totals.included == {0: 1, 1: 2}


def test_figures_of_engines_come_once_and_go_with_them():
    pool = Pool()
    pool.hear(0, front_end(1))
    pool.hear(1, front_end(1))
    pool.note(EngineUp(0, 0, "address", EngineReady(max_model_len=1, vocab_size=1, num_blocks=1, block_size=1)))
    pool.note(EngineLoadReport(0, SchedulerStats(num_running=3, kv_cache_usage=0.5, num_preemptions=4)))
    values = pool.values()
    assert (values["vllm:num_requests_running"], values["vllm:kv_cache_usage_perc"]) == (3, 0.5)
    assert values["vllm:num_preemptions_total"] == 4
    assert pool.values("1")["vllm:num_requests_running"] == 0
    pool.note(EngineDown(0, 0, "gone"))
    assert pool.values()["vllm:num_requests_running"] == 0


@pytest.mark.parametrize(
    "counts",
    [
        FrontEndCounts(9, False, {2: EngineCounts()}, 0),
        FrontEndCounts(9, False, {-1: EngineCounts()}, 0),
        FrontEndCounts(
            9, False, {1: EngineCounts({}, {}, {"e2e_request_latency_seconds": HistogramCounts([1], 1.0)})}, 0
        ),
    ],
    ids=["unknown engine", "negative engine", "other buckets"],
)
def test_counts_that_cannot_be_are_dropped(counts):
    pool = Pool()
    pool.hear(0, front_end(5))
    pool.take(0, counts)
    assert pool.values()["vllm:generation_tokens_total"] == 5


@pytest.mark.parametrize(
    "engine",
    [
        EngineCounts({f"n{number}": 1 for number in range(65)}),
        EngineCounts({"n" * 65: 1}),
        EngineCounts({"n": -1}),
        EngineCounts({}, {}, {"h": HistogramCounts([0] * (MAX_BUCKETS + 1), 0.0)}),
    ],
    ids=["names", "a long name", "negative", "buckets"],
)
def test_messages_are_bounded(engine):
    wire = msgspec.msgpack.encode(FrontEndCounts(1, False, {0: engine}, 0))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wire, type=FrontEndCounts)
