"""The hit rate forgets."""

import pytest

from pagemill.observability.hit_rate import RecentHits


def test_only_the_most_recent_queries_count():
    hits = RecentHits(2)
    assert hits.rate == 0
    hits.add(100, 100)
    assert hits.rate == 1
    hits.add(300, 0)
    assert hits.rate == pytest.approx(0.25)
    hits.add(100, 40)
    assert hits.rate == pytest.approx(0.1)


def test_a_thousand_by_default():
    hits = RecentHits()
    hits.add(10, 10)
    for _ in range(999):
        hits.add(10, 0)
    assert hits.rate == pytest.approx(0.001)
    hits.add(10, 0)
    assert hits.rate == 0
