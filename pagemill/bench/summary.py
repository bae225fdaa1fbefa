"""Mean, median and percentiles of measured durations. Knows nothing about what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one kind of duration, in milliseconds."""

    mean_ms: float
    median_ms: float
    p99_ms: float


def summarize(durations_s: Sequence[float]) -> Summary | None:
    """Figures in milliseconds of durations in seconds; None when there are none. Percentiles are interpolated."""
    if not durations_s:
        return None
    values_ms = np.asarray(durations_s, dtype=np.float64) * 1e3
    median, p99 = np.percentile(values_ms, (50, 99))
    return Summary(float(values_ms.mean()), float(median), float(p99))
