"""When requests are sent. Knows rates, not requests."""

import math
from collections.abc import Sequence

import numpy as np

from pagemill.errors import ConfigError


def arrival_times_s(num_requests: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> Sequence[float]:
    """Seconds after the start at which each request is sent.

    `rate` is in requests per second; infinite sends all at once. The gaps are gamma-distributed with shape
    `burstiness`: 1 is a Poisson process, less comes in bursts, more is steadier. Raises ConfigError.
    """
    if not rate > 0:
        raise ConfigError(f"request_rate={rate} is not allowed: more than 0, or inf")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ConfigError(f"burstiness={burstiness} is not allowed: more than 0")
    if math.isinf(rate):
        return [0.0] * num_requests
    gaps_s = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), num_requests)
    times_s: list[float] = (np.cumsum(gaps_s) - gaps_s[0]).tolist()
    return times_s
