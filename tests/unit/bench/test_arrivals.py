import math

import numpy as np
import pytest

from pagemill.bench.arrivals import arrival_times_s
from pagemill.errors import ConfigError


def test_an_infinite_rate_sends_all_at_once():
    assert arrival_times_s(3, math.inf) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_gaps_have_the_rate_and_the_spread(burstiness: float, spread: float):
    """Standard deviation / mean of the gaps: 1 for Poisson arrivals, 1 / sqrt(burstiness) in general."""
    times_s = arrival_times_s(40_000, rate=20.0, burstiness=burstiness, seed=3)
    gaps_s = np.diff(times_s)
    assert times_s[0] == 0.0 and (gaps_s >= 0).all()
    assert gaps_s.mean() == pytest.approx(1 / 20.0, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(spread, rel=0.05)


def test_the_same_seed_makes_the_same_arrivals():
    assert arrival_times_s(9, 2.0, seed=1) == arrival_times_s(9, 2.0, seed=1)
    assert arrival_times_s(9, 2.0, seed=1) != arrival_times_s(9, 2.0, seed=2)


@pytest.mark.parametrize("changes", [{"rate": 0.0}, {"rate": math.nan}, {"burstiness": 0.0}, {"burstiness": math.inf}])
def test_impossible_arrivals(changes: dict[str, float]):
    with pytest.raises(ConfigError, match="is not allowed: more than 0"):
        arrival_times_s(3, **{"rate": 1.0, **changes})
