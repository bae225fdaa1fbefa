"""What front ends are told about the engines, by whoever starts and restarts them."""

import msgspec

from pagemill.messages.engine_io import EngineReady
from pagemill.messages.metrics import MetricsTotals
from pagemill.messages.stats import SchedulerStats


class EngineUp(msgspec.Struct, frozen=True, tag="up"):
    """An engine takes requests."""

    index: int
    """Which of the engines: 0 to data_parallel_size - 1."""
    incarnation: int
    """0, then one more for every restart."""
    address: str
    """Where its socket is."""
    ready: EngineReady


class EngineDown(msgspec.Struct, frozen=True, tag="down"):
    """An engine is gone, with everything it had."""

    index: int
    incarnation: int
    reason: str
    final: bool = False
    """True: it will not be started again."""
    follows: bool = False
    """It had to end because another one did: its requests are not suspected of it."""
    num_failed_starts: int = 0
    """In a row, up to this one; 0: it was up before."""
    awaits_node: bool = False
    """Its whole machine is gone, or out of reach: it is back when that is."""


class EngineStalled(msgspec.Struct, frozen=True, tag="stalled"):
    """An engine has work and finishes no step, or goes on again."""

    index: int
    incarnation: int
    stalled: bool


class EngineLoadReport(msgspec.Struct, frozen=True, tag="load"):
    """How busy an engine is, from all front ends together; several times a second."""

    index: int
    stats: SchedulerStats


class AbortOrder(msgspec.Struct, frozen=True, tag="abort"):
    """Requests are to be ended, by the ids of their answers, whichever front end has them."""

    request_ids: list[str] | None
    """None: all."""


class HaltOrder(msgspec.Struct, frozen=True, tag="halt"):
    """What every engine was told, and one that is started from now on is told first."""

    call: str
    """pause, hold or resume: a name of `CoreApi.call`."""


class DrainOrder(msgspec.Struct, frozen=True, tag="drain"):
    """Whether front ends refuse new requests, also those that are started from now on."""

    drains: bool


FrontEndOrder = AbortOrder | HaltOrder | DrainOrder
"""What one front end tells the others."""
FleetEvent = EngineUp | EngineDown | EngineStalled | EngineLoadReport
FrontEndMessage = FleetEvent | MetricsTotals | FrontEndOrder
"""All that front ends in processes of their own are told."""
