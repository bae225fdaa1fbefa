"""`EngineSupervisor`: starts an engine core in a process of its own, watches it, and starts it again when it dies.

Does not know what a core does, nor who its clients are: it publishes what becomes of it as events.
"""

import contextlib
import faulthandler
import math
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import psutil

from pagemill.errors import ConfigError, EngineDeadError, ModelError
from pagemill.log import get_logger
from pagemill.messages.fleet import EngineDown, EngineLoadReport, EngineStalled, EngineUp, FleetEvent
from pagemill.messages.process_reports import Failed, ProcessReport, Pulse, Started
from pagemill.transport.liveness import Pauses
from pagemill.utils.awake_clock import AwakeClock
from pagemill.utils.processes import STACKS_SIGNAL, Child, describe_exit

logger = get_logger(__name__)

CORE = "pagemill.engine.process:run"
POLL_S = 0.25
MAX_GAP_S = 1.0
"""Between two looks at an engine. A longer gap tells that this process itself did not run."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before a start that failed is tried again: the first, and the most that it grows to."""
MAX_FAILED_STARTS = 7
"""Starts in a row that may fail before the engine is given up: with the pauses between them, after a minute or more."""
DUMP_S = 1.5
"""What processes get to write their stacks before they are killed."""
STDERR_FD = 2
_REPORTS = msgspec.msgpack.Decoder(ProcessReport)
_USERS_TO_MEND = {"ConfigError": ConfigError, "ModelError": ModelError}


@dataclass(frozen=True)
class LivenessTimeouts:
    """How long an engine may show no sign of life, in seconds of the supervisor's: while it is stopped itself, as with
    a paused container, nobody's time runs."""

    stalled_s: float = 60.0
    """Without a finished step while there is work, until it counts as stalled; 0: never for that reason."""
    hung_s: float = 300.0
    """Without a finished step while there is work, until it is killed and started again; 0: it is never killed, for
    whatever reason."""
    silent_s: float = 10.0
    """Without a pulse, until it counts as stalled; it is killed after three times as long. A pulse comes from a
    thread of its own: its absence means that the whole process is stopped."""

    @property
    def silent_until_killed_s(self) -> float:
        """Without a pulse, until it is killed."""
        return 3 * self.silent_s if self.hung_s else math.inf


class _Watch:
    """One incarnation's signs of life. `stalled` or `hung` is looked at more often than every `MAX_GAP_S`."""

    def __init__(self, patience: LivenessTimeouts) -> None:
        self._patience = patience
        self._clock = AwakeClock(MAX_GAP_S)
        self._last_pulse = self._last_progress = self._clock.now()
        self._num_steps = -1
        self.idle = True

    def note(self, pulse: Pulse) -> None:
        now = self._last_pulse = self._clock.now()
        if pulse.idle or self.idle or pulse.num_steps != self._num_steps:
            self._last_progress = now
        self._num_steps, self.idle = pulse.num_steps, pulse.idle

    @property
    def stalled(self) -> bool:
        return self._exceeds(self._patience.stalled_s, self._patience.silent_s)

    @property
    def hung(self) -> bool:
        return self._exceeds(self._patience.hung_s, self._patience.silent_until_killed_s)

    def _exceeds(self, progress_s: float, pulse_s: float) -> bool:
        now = self._clock.now()
        stuck = not self.idle and now - self._last_progress > (progress_s or math.inf)
        return stuck or now - self._last_pulse > pulse_s


class EngineSupervisor:
    """Keeps one engine alive, on a thread of its own, until `stop`.

    `payload(incarnation)` is what the core's process is given; `publish` is called on the supervisor's thread.
    """

    def __init__(
        self,
        index: int,
        payload: Callable[[int], bytes],
        publish: Callable[[FleetEvent], None],
        patience: LivenessTimeouts,
        entry: str = CORE,
    ) -> None:
        self.index = index
        self._payload = payload
        self._publish = publish
        self._patience = patience
        self._entry = entry
        self._stopping = threading.Event()
        self._replaced = -1, ""
        self._first: Future[EngineUp] = Future()
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._run, name=f"pagemill-supervisor-{index}", daemon=True)

    def start(self) -> None:
        """Begin; `first_up` waits for the result."""
        self._thread.start()

    def first_up(self) -> EngineUp:
        """The first time the engine was ready. Raises what kept it from starting: ConfigError, ModelError, or
        EngineDeadError for anything that is not the user's to mend."""
        return self._first.result()

    @property
    def pid(self) -> int | None:
        """Of the present process."""
        return None if self._child is None else self._child.pid

    def ask_to_stop(self) -> None:
        """Begin to stop; `stop` waits for the end."""
        self._stopping.set()

    def replace(self, incarnation: int, reason: str) -> None:
        """Kill this incarnation, if it is still the present one, and start the next."""
        self._replaced = incarnation, reason

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the engine and the thread. A second call does nothing."""
        self.ask_to_stop()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        incarnation = num_failed = 0
        pauses = Pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                started, reason = self._live(incarnation)
            except Exception as error:  # whatever it is, the engine must not be left without a supervisor
                logger.exception("engine core %d could not be started or watched", self.index)
                started, reason = False, f"{type(error).__name__}: {error}"
                self._say_lost(reason)
            if self._stopping.is_set() or not (started or incarnation):
                break
            if started:
                pauses.reset()
            num_failed, pause_s = (0, 0.0) if started else (num_failed + 1, pauses.next())
            final = num_failed >= MAX_FAILED_STARTS
            what_next = "it is given up" if final else f"starting it again{f' in {pause_s:g} s' if pause_s else ''}"
            logger.error("engine core %d is gone: %s; %s", self.index, reason, what_next)
            self._publish(EngineDown(self.index, incarnation, reason, final, num_failed_starts=num_failed))
            if final or self._stopping.wait(pause_s):
                break
            incarnation += 1
        if not self._first.done():
            self._first.set_exception(EngineDeadError("the engine was stopped while it started"))

    def _live(self, incarnation: int) -> tuple[bool, str]:
        """One incarnation from birth to death. Returns whether it ever was ready, and why it died."""
        title = f"pagemill: engine core {self.index}"
        child = self._child = Child(self._entry, title, self._payload(incarnation))
        started, problem = False, None
        try:
            watch: _Watch | None = None
            stalled = False
            while not self._stopping.is_set():
                match report := self._next_report(child):
                    case Started():
                        started, watch = True, _Watch(self._patience)
                        self._say_up(EngineUp(self.index, incarnation, report.address, report.ready))
                    case Failed():
                        problem = report.message
                        self._say_failed(report)
                    case Pulse() if watch is not None:
                        watch.note(report)
                        self._publish(EngineLoadReport(self.index, report.stats))
                if watch is not None and watch.stalled != stalled:
                    stalled = watch.stalled
                    self._publish(EngineStalled(self.index, incarnation, stalled))
                    self._say_stalled(child, stalled)
                if self._replaced[0] == incarnation:
                    problem = self._replaced[1]
                    child.kill()
                    break
                if watch is not None and watch.hung:
                    problem = "it hung and was killed"
                    dump_stacks(child.pid, wake=True)
                    child.kill()
                    break
        except EOFError:
            status = child.stop(ask_s=1.0)
            problem = problem or describe_exit(status)
        finally:
            child.stop(ask_s=0.0)
        if problem is not None:
            self._say_lost(problem)
        return started, problem or "it was stopped"

    def _next_report(self, child: Child) -> ProcessReport | None:
        """What the core says next, if it says something. Raises EOFError when it is gone."""
        content = child.report(POLL_S)
        try:
            return _REPORTS.decode(content) if content is not None else None
        except msgspec.DecodeError as error:
            logger.error("dropped a report of engine core %d: %s", self.index, error)
            return None

    def _say_up(self, event: EngineUp) -> None:
        if self._first.done():
            logger.info("engine core %d is back", self.index)
        else:
            self._first.set_result(event)
        self._publish(event)

    def _say_stalled(self, child: Child, stalled: bool) -> None:
        if not stalled:
            logger.warning("engine core %d goes on again", self.index)
            return
        logger.error("engine core %d has stalled: no sign of life, or work and no finished step", self.index)
        dump_stacks(child.pid, wake=False)
        faulthandler.dump_traceback(STDERR_FD)  # of this process, which serves or supervises

    def _say_lost(self, reason: str) -> None:
        if not self._first.done():
            self._first.set_exception(EngineDeadError(f"the engine core could not start: {reason}"))

    def _say_failed(self, report: Failed) -> None:
        if not self._first.done():
            kind = _USERS_TO_MEND.get(report.kind, EngineDeadError)
            self._first.set_exception(kind(report.message))


def dump_stacks(pid: int, *, wake: bool) -> None:
    """Let a process and all its children write the stacks of their threads to stderr. One that is stopped (SIGSTOP)
    can do so only if it goes on: `wake` lets it."""
    try:
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            state = process.status()
            logger.error("stacks of process %d (%s, %s):", process.pid, " ".join(process.cmdline()).strip(), state)
            process.send_signal(STACKS_SIGNAL)
            if wake and state == psutil.STATUS_STOPPED:
                process.send_signal(signal.SIGCONT)
    time.sleep(DUMP_S)
