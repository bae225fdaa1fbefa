"""The line of figures, by a clock of our own."""

from pagemill.messages.stats import SchedulerStats
from pagemill.observability.serving_metrics import ServingMetrics
from pagemill.observability.stats_log import StatsLog


def test_rates_since_the_last_line_and_silence_when_nothing_happens():
    now, engines = [100.0], {0: SchedulerStats(), 1: SchedulerStats()}
    metrics = ServingMetrics("m", 100, {}, lambda: engines)
    log = StatsLog(metrics, lambda: now[0])
    now[0] += 5
    assert log.line() is None

    engines[0] = SchedulerStats(num_running=3, num_waiting=2, kv_cache_usage=0.5)
    engines[1] = SchedulerStats(num_running=1)
    metrics.of_engine(0).num_prompt_tokens += 40
    metrics.of_engine(0).num_generation_tokens += 5
    metrics.of_engine(1).num_generation_tokens += 5
    metrics.prefix_hits.add(40, 10)
    now[0] += 5
    assert log.line() == (
        "running: 4, waiting: 2, KV cache usage: 25.0%, prompt: 8.0 tokens/s, generation: 2.0 tokens/s, "
        "prefix cache hit rate: 25.0%"
    )

    now[0] += 5
    assert "prompt: 0.0 tokens/s, generation: 0.0 tokens/s" in log.line(), "requests that get nothing are work too"
    engines.update({0: SchedulerStats(), 1: SchedulerStats()})
    metrics.of_engine(0).num_generation_tokens += 1
    now[0] += 10
    assert "running: 0, waiting: 0" in log.line(), "what ended since the last line is said once"
    assert log.line() is None
