"""What a child process tells the one that started it, over their pipe."""

import msgspec

from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import FrontEndOrder
from pagemill.messages.metrics import FrontEndCounts
from pagemill.messages.stats import SchedulerStats


class Started(msgspec.Struct, frozen=True, tag="started"):
    """An engine core takes requests."""

    address: str
    ready: EngineReady


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """A front end takes requests."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It cannot start; it ends after this."""

    kind: str
    """Name of the exception's class: ConfigError and ModelError are the user's to mend."""
    message: str


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """Sent several times a second, by a thread that does nothing else."""

    num_steps: int
    """Steps finished so far."""
    idle: bool
    """Whether there is nothing to do."""
    stats: SchedulerStats


class FrontEndPulse(msgspec.Struct, frozen=True, tag="front end pulse"):
    """Sent every second, by a thread that does nothing else: absent when the process is stopped."""


ProcessReport = Started | Listening | Failed | Pulse
FrontEndReport = Listening | FrontEndCounts | FrontEndPulse | FrontEndOrder
