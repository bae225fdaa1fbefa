"""The line about drafts, since the last one."""

from pagemill.messages.stats import DraftCounts, SchedulerStats
from pagemill.observability.draft_rates import DraftRates
from pagemill.observability.serving_metrics import ServingMetrics
from pagemill.observability.stats_log import StatsLog


def test_rates_are_those_of_all_engines_since_the_last_line():
    rates = DraftRates()
    assert rates.line([SchedulerStats()], 1.0) is None
    engines = [SchedulerStats(drafts=DraftCounts(10, 40, (5, 3))), SchedulerStats(drafts=DraftCounts(10, 20, (5,)))]
    assert rates.line(engines, 2.0) == (
        "SpecDecoding metrics: Mean acceptance length: 1.65, Accepted throughput: 6.50 tokens/s, Drafted throughput: "
        "30.00 tokens/s, Accepted: 13 tokens, Drafted: 60 tokens, Per-position acceptance rate: 0.500, 0.150, "
        "Avg Draft acceptance rate: 21.7%"
    )
    assert rates.line(engines, 1.0) is None
    restarted = [SchedulerStats(drafts=DraftCounts(1, 2, (1, 1)))]
    assert "Mean acceptance length: 3.00" in rates.line(restarted, 1.0)


def test_the_log_asks_for_it_after_the_other_line():
    now, engines = [0.0], {0: SchedulerStats()}
    log = StatsLog(ServingMetrics("m", 100, {}, lambda: engines), lambda: now[0])
    engines[0] = SchedulerStats(num_running=1, drafts=DraftCounts(1, 4, (1, 0, 0, 0)))
    now[0] += 4
    log.line()
    assert "Accepted throughput: 0.25 tokens/s" in log.draft_line()
    assert log.draft_line() is None
