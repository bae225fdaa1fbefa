"""A clock that stands still while its owner does."""

import pytest

from pagemill.utils import awake_clock
from pagemill.utils.awake_clock import AwakeClock


@pytest.fixture
def time(monkeypatch):
    class Time:
        now = 100.0

        def monotonic(self):
            return self.now

    monkeypatch.setattr(awake_clock, "time", time := Time())
    return time


def test_time_passes_while_it_is_looked_at(time):
    clock = AwakeClock(2.0)
    assert clock.now() == 0
    for _ in range(4):
        time.now += 1.5
        clock.now()
    assert clock.now() == 6


def test_a_long_gap_counts_as_a_short_one(time):
    clock = AwakeClock(2.0)
    time.now += 3600
    assert clock.now() == 2
    time.now += 1
    assert clock.now() == 3
