"""What front ends have counted, on its way to be added up; of bounded size, as receivers keep it.

Does not know which metrics there are: counts and histograms travel by name.
"""

from typing import Annotated

import msgspec

from pagemill.messages.stats import SchedulerStats

MAX_NAMES = 64
MAX_NAME_CHARS = 64
MAX_BUCKETS = 256
MAX_ENGINES = 65_536

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Counts = Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_NAMES)]


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    """Observations per bucket, the last one without a bound; not cumulative."""

    counts: Annotated[list[Count], msgspec.Meta(max_length=MAX_BUCKETS)]
    total: float
    """Sum of the observations."""


class EngineCounts(msgspec.Struct, frozen=True, array_like=True):
    """What was counted of the work of one engine."""

    counters: Counts = {}
    ended: Counts = {}
    """Completions by finish reason."""
    histograms: Annotated[dict[Name, HistogramCounts], msgspec.Meta(max_length=MAX_NAMES)] = {}


EngineCountsByIndex = Annotated[dict[int, EngineCounts], msgspec.Meta(max_length=MAX_ENGINES)]


class FrontEndCounts(msgspec.Struct, frozen=True, tag="counts"):
    """All that one front end has counted since it was started."""

    taken_at_ns: int
    """By time.monotonic_ns(); every one of a front end is later than those before, also of one that died."""
    asks: bool
    """Whether it waits for MetricsTotals that include this."""
    engines: EngineCountsByIndex
    num_rejected: Counts
    """Requests refused at a limit, by reason."""


class MetricsTotals(msgspec.Struct, frozen=True, tag="totals"):
    """What all front ends of a server have counted, those that died included."""

    engines: EngineCountsByIndex
    num_rejected: Counts
    """Requests refused at a limit, by reason."""
    stats: dict[int, SchedulerStats]
    """The latest figures of the engines that are up."""
    included: dict[int, int]
    """Index of a front end -> `taken_at_ns` of its latest counts in here."""
