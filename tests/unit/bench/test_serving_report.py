import pytest

from pagemill.bench.load import Sent
from pagemill.bench.serving_report import make_report, parse_goals
from pagemill.bench.summary import summarize
from pagemill.errors import ConfigError

RESULTS = [
    Sent(0.0, [0.1, 0.2, 0.4], num_prompt_tokens=10, num_output_tokens=3),
    Sent(1.0, [1.5, 2.0], num_prompt_tokens=20, num_output_tokens=2),
    Sent(1.2, [], error="ReadError: gone"),
    Sent(1.3, []),
]


def test_summaries():
    summary = summarize([0.001 * number for number in range(1, 102)])
    assert summary is not None
    assert (summary.mean_ms, summary.median_ms, summary.p99_ms) == pytest.approx((51.0, 51.0, 100.0))
    assert summarize([]) is None


def test_the_figures():
    report = make_report(RESULTS)
    assert (report.num_completed, report.num_failed, report.first_error) == (2, 2, "ReadError: gone")
    assert report.duration_s == pytest.approx(2.0)
    assert report.output_tokens_per_s == pytest.approx(2.5)
    assert report.total_tokens_per_s == pytest.approx(17.5)
    assert report.requests_per_s == pytest.approx(1.0)
    assert report.good_requests_per_s is None
    assert report.ttft is not None and report.ttft.mean_ms == pytest.approx(300.0)
    assert report.tpot is not None and report.tpot.mean_ms == pytest.approx((150.0 + 500.0) / 2)
    assert report.itl is not None and report.itl.median_ms == pytest.approx(200.0)
    assert report.e2el is not None and report.e2el.mean_ms == pytest.approx((400.0 + 1000.0) / 2)


@pytest.mark.parametrize(
    ("goals", "num_good"),
    [
        ({"ttft": 200.0}, 1),
        ({"ttft": 600.0}, 2),
        ({"ttft": 600.0, "tpot": 200.0}, 1),
        ({"e2el": 300.0}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_goal(goals: dict[str, float], num_good: int):
    assert make_report(RESULTS, goals).good_requests_per_s == pytest.approx(num_good / 2.0)


def test_nothing_answered():
    report = make_report(RESULTS[2:])
    assert (report.num_completed, report.output_tokens_per_s, report.ttft) == (0, 0.0, None)


def test_goals():
    assert parse_goals(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    for word in ("ttft", "ttft:x", "ttft:0", "speed:3", "ttft:nan"):
        with pytest.raises(ConfigError, match="NAME:MILLISECONDS with NAME one of ttft, tpot, e2el"):
            parse_goals([word])
