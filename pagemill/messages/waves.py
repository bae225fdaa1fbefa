"""Messages between the coordinator of data-parallel engines and an engine, so that all engines step together.

A wave is the time from the first request that arrives while every engine is paused until all of them are without
work. It is divided into rounds of equally many steps, counted from 0.
"""

import msgspec


class JoinWaves(msgspec.Struct, frozen=True, tag="join_waves"):
    """The first message to an engine over a connection: where the others are."""

    wave: int
    """Number of the present wave, or of the last one."""
    round: int | None
    """The round to begin with; None: all are paused."""
    resumes: bool = False
    """The engine has joined before, and the connection was lost: `round` is the one whose reports are awaited."""


class StartWave(msgspec.Struct, frozen=True, tag="start_wave"):
    """An engine has started this wave. Who still finishes the one before begins after that."""

    wave: int


class RoundDecision(msgspec.Struct, frozen=True, tag="round_verdict"):
    """Every engine has reported a round. All pause after the round that follows it, or go on."""

    wave: int
    round: int
    go_on: bool


WaveOrder = JoinWaves | StartWave | RoundDecision
"""Coordinator to engine."""


class WaveStarted(msgspec.Struct, frozen=True, tag="wave_started"):
    """A request arrived while this engine was paused; it steps already."""

    wave: int


class RoundDone(msgspec.Struct, frozen=True, tag="round_done"):
    """This engine has taken the steps of a round."""

    wave: int
    round: int
    has_work: bool
    """Whether it has requests at the end of the round."""


WaveReport = WaveStarted | RoundDone
"""Engine to coordinator."""
