"""How a process watches its children: their reports, their silence, their end, and when the next one is started.

Knows nothing about what a child does, nor what a silent one deserves: that is the policy of each owner.
`start_heartbeat` is the child's side.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from pagemill.utils.awake_clock import AwakeClock
from pagemill.utils.backoff import Backoff
from pagemill.utils.cpu_affinity import pin_to
from pagemill.utils.processes import Child, describe_exit

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""Before the second start in a row; it doubles with every start that fails."""
LONGEST_PAUSE_S = 30.0
"""The pause that doubling stops at."""
MAX_FAILED_STARTS = 7
"""Starts in a row that may fail before a child is given up: with the pauses between them, after a minute or more."""
GAP_POLLS = 4
"""Between two polls of a child. A longer gap tells that this process itself did not run."""
LAST_WORDS_S = 1.0
"""What a child gets to end by itself once its report pipe is closed."""

ReportT = TypeVar("ReportT")


class WatchedChild(Generic[ReportT]):
    """A running child, with its reports decoded and its silence measured.

    One thread iterates over `reports`; any thread may read `silent_s`. While this process is stopped itself, as in a
    paused container, nobody counts as silent.
    """

    def __init__(self, child: Child, decoder: "msgspec.msgpack.Decoder[ReportT]", *, poll_s: float = 0.25) -> None:
        self.child = child
        self.has_reported = False
        self._decoder = decoder
        self._poll_s = poll_s
        self._clock = AwakeClock(GAP_POLLS * poll_s)
        self._last_report_s = self._clock.now()

    @property
    def silent_s(self) -> float:
        """Seconds since the last report, or since the start while there was none."""
        return self._clock.now() - self._last_report_s

    def reports(self) -> Iterator[ReportT | None]:
        """Each report as it comes, and None for one that cannot be read, or when `poll_s` seconds passed without one;
        until the child is gone."""
        while True:
            try:
                content = self.child.report(self._poll_s)
            except EOFError:
                return
            now = self._clock.now()
            if content is None:
                yield None
                continue
            self.has_reported = True
            self._last_report_s = now
            yield self._decode(content)

    def end(self) -> str:
        """Wait for the end of a child whose reports have ended, or end it; how it ended, in words."""
        return describe_exit(self.child.stop(grace_s=LAST_WORDS_S))

    def _decode(self, content: bytes) -> ReportT | None:
        try:
            return self._decoder.decode(content)
        except msgspec.DecodeError as error:
            logger.error("dropped a report of %s: %s", self.child.title, error)
            return None


@dataclass(frozen=True)
class Restart:
    """What follows the end of a child."""

    pause_s: float
    """Seconds to wait before the next start."""
    num_failed_starts: int
    """In a row, up to this one; 0: it had started."""
    is_final: bool
    """No further start: too many have failed."""

    def __str__(self) -> str:
        if self.is_final:
            return "it is given up"
        return f"starting it again in {self.pause_s:g} s" if self.pause_s else "starting it again"


class Restarts:
    """Decides when a child that has ended is started again: at once after a life, with growing pauses after starts
    that failed, and not at all after `MAX_FAILED_STARTS` of those in a row."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._num_failed = 0

    def after_end(self, *, had_started: bool) -> Restart:
        """A child has ended; `had_started`: it had done its work before."""
        if had_started:
            self._backoff.reset()
            self._num_failed = 0
            return Restart(0.0, 0, is_final=False)
        self._num_failed += 1
        return Restart(self._backoff.next_s(), self._num_failed, is_final=self._num_failed >= MAX_FAILED_STARTS)


def start_heartbeat(beat: Callable[[], object], interval_s: float, cpus: frozenset[int] = frozenset()) -> None:
    """Call `beat` now and every `interval_s` seconds, on a daemon thread of its own, until it returns False. The thread
    runs on `cpus`, where there are any."""

    def run() -> None:
        pin_to(cpus)
        pause = threading.Event()
        while beat() is not False:
            pause.wait(interval_s)

    threading.Thread(target=run, name="pagemill-heartbeat", daemon=True).start()
