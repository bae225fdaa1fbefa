"""Waves: when an engine steps that must step together with others. `WaveMember` is one engine's part in them.

Does not know how reports and orders travel, nor what a step does. Why engines must step together at all: the expert
layers of a mixture of experts exchange tokens between data-parallel replicas in every forward pass, so each pass of
one engine needs one of all others, with requests or without.
"""

from collections.abc import Callable
from typing import Protocol

from pagemill.messages.waves import JoinWaves, RoundDecision, RoundDone, StartWave, WaveOrder, WaveReport, WaveStarted

ROUND_STEPS = 16
"""Steps between two reports to the coordinator. A wave ends with one to two rounds for nothing."""


class Waves(Protocol):
    """Decides when a loop takes a step."""

    shared: bool
    """Whether other engines wait for each step that is due."""

    def due(self) -> bool:
        """Whether a step is to be taken now."""

    def stepped(self, num_executed: int) -> None:
        """`num_executed` steps in all were given to the workers since the engine's start."""

    def on_order(self, order: WaveOrder) -> None:
        """Apply an order of the coordinator."""


class NoWaves:
    """An engine that steps when it has work, whatever others do."""

    shared = False

    def __init__(self, has_work: Callable[[], bool]) -> None:
        self.due = has_work

    def stepped(self, num_executed: int) -> None:
        """Do nothing: without waves no steps are counted."""

    def on_order(self, order: WaveOrder) -> None:
        """Do nothing: without waves there is no coordinator."""


class WaveMember:
    """An engine that steps while any engine has work, and pauses with all others after the same step.

    Paused, it begins the next wave when it has work, or when it is told that another has. At the end of each round it
    reports whether it has work, and goes on with the next round; what all reports together say is needed at the end
    of that one only, so that nobody waits for the coordinator unless another engine is a whole round behind. A request
    that comes after the last report is not lost: the engine pauses, finds that it has work, and begins a wave.

    Until it has joined it takes no step.
    """

    shared = True

    def __init__(self, has_work: Callable[[], bool], report: Callable[[WaveReport], None]) -> None:
        self._has_work = has_work
        self._report = report
        self._joined = False
        self._running = False
        self._wave = 0
        """The present wave, or the last one."""
        self._announced = 0
        """The latest wave that another engine started."""
        self._round = 0
        self._num_left = 0
        """Steps left of the present round."""
        self._num_executed = 0
        self._go_on: bool | None = True
        """The decision on the round before the present one; None: not known yet."""

    def due(self) -> bool:
        """Whether a step is to be taken now. A paused engine that has work begins a wave."""
        if self._running:
            return self._num_left > 0
        if not self._joined:
            return False
        if self._announced > self._wave:
            self._begin(self._announced, 0)
        elif self._has_work():
            self._begin(self._wave + 1, 0)
            self._report(WaveStarted(self._wave))
        return self._running

    def stepped(self, num_executed: int) -> None:
        """Count steps; a call that only collects what earlier steps sampled is none."""
        self._num_left -= num_executed - self._num_executed
        self._num_executed = num_executed
        if self._running and not self._num_left:
            self._end_round()

    def on_order(self, order: WaveOrder) -> None:
        """Apply an order of the coordinator; one that belongs to another round is late, and ignored."""
        match order:
            case JoinWaves(wave, number, resumes) if resumes and self._joined:
                self._catch_up(wave, number)
            case JoinWaves(wave, number):
                # Also what was announced: a head that was started again counts anew.
                self._joined = True
                self._running = False
                self._wave = wave
                self._announced = wave
                if number is not None:
                    self._begin(wave, number)
            case StartWave(wave):
                self._announced = max(wave, self._announced)
            case RoundDecision(wave, number, go_on):
                if self._running and (wave, number + 1) == (self._wave, self._round):
                    self._on_decision(go_on=go_on)

    def _catch_up(self, wave: int, number: int | None) -> None:
        """What was said while the connection was lost, either way, follows from where the coordinator is. It waits for
        this engine's report of a round before it goes on to the next."""
        if not self._running:
            self._announced = max(wave, self._announced)
        elif wave < self._wave:
            self._report(WaveStarted(self._wave))
            self._report_again()
        elif wave > self._wave:  # this one is over
            self._announced = max(wave, self._announced)
            self._on_decision(go_on=False)
        elif number == self._round - 1:
            self._report_again()
        else:
            self._on_decision(go_on=number is not None)

    def _report_again(self) -> None:
        if self._round:
            self._report(RoundDone(self._wave, self._round - 1, self._has_work()))

    def _on_decision(self, *, go_on: bool) -> None:
        """The coordinator has decided on the round before the present one."""
        self._go_on = go_on
        if not self._num_left:
            self._end_round()

    def _begin(self, wave: int, number: int) -> None:
        self._running = True
        self._wave = wave
        self._round = number
        self._num_left = ROUND_STEPS
        self._go_on = True

    def _end_round(self) -> None:
        """Pause, or continue with the next round; called again when the decision comes, if it is not known yet."""
        if self._go_on is None:
            return
        if not self._go_on:
            self._running = False
            return
        self._report(RoundDone(self._wave, self._round, self._has_work()))
        self._round += 1
        self._num_left = ROUND_STEPS
        self._go_on = None
