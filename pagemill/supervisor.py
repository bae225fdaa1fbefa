"""`EngineSupervisor`: starts an engine core in a process of its own, watches it, and starts it again when it dies.

Does not know what a core does, nor who its clients are: it publishes what becomes of it as events.
"""

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
from pagemill.utils.processes import STACKS_SIGNAL, Child, describe_exit

logger = get_logger(__name__)

CORE = "pagemill.engine.process:run"
POLL_S = 0.25
MAX_FAILED_STARTS = 3
"""Starts in a row that may fail before the engine is given up."""
DUMP_S = 0.5
"""What processes get to write their stacks before they are killed."""
_REPORTS = msgspec.msgpack.Decoder(ProcessReport)
_USERS_TO_MEND = {"ConfigError": ConfigError, "ModelError": ModelError}


@dataclass(frozen=True)
class Patience:
    """How long an engine may show no sign of life, in seconds."""

    stalled_s: float = 60.0
    """Without a finished step while there is work, until it counts as stalled."""
    hung_s: float = 300.0
    """Without a finished step while there is work, until it is killed and started again."""
    silent_s: float = 10.0
    """Without a pulse, until it counts as stalled; it is killed after three times as long. A pulse comes from a
    thread of its own: its absence means that the whole process is stopped."""


class _Watch:
    """One incarnation's signs of life."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._last_pulse = self._last_progress = time.monotonic()
        self._num_steps = -1
        self.idle = True

    def note(self, pulse: Pulse) -> None:
        now = self._last_pulse = time.monotonic()
        if pulse.idle or self.idle or pulse.num_steps != self._num_steps:
            self._last_progress = now
        self._num_steps, self.idle = pulse.num_steps, pulse.idle

    @property
    def stalled(self) -> bool:
        return self._exceeds(self._patience.stalled_s, self._patience.silent_s)

    @property
    def hung(self) -> bool:
        return self._exceeds(self._patience.hung_s, 3 * self._patience.silent_s)

    def _exceeds(self, progress_s: float, pulse_s: float) -> bool:
        now = time.monotonic()
        return now - self._last_pulse > pulse_s or (not self.idle and now - self._last_progress > progress_s)


class EngineSupervisor:
    """Keeps one engine alive, on a thread of its own, until `stop`.

    `payload(incarnation)` is what the core's process is given; `publish` is called on the supervisor's thread.
    """

    def __init__(
        self,
        index: int,
        payload: Callable[[int], bytes],
        publish: Callable[[FleetEvent], None],
        patience: Patience,
        entry: str = CORE,
    ) -> None:
        self.index = index
        self._payload = payload
        self._publish = publish
        self._patience = patience
        self._entry = entry
        self._stopping = threading.Event()
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

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the engine and the thread. A second call does nothing."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        incarnation = num_failed = 0
        while True:
            started, reason = self._live(incarnation)
            if self._stopping.is_set() or not (started or incarnation):
                break
            num_failed = 0 if started else num_failed + 1
            final = num_failed >= MAX_FAILED_STARTS
            logger.error("engine core %d is gone: %s%s", self.index, reason, "" if final else "; starting it again")
            self._publish(EngineDown(self.index, incarnation, reason, final))
            if final:
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
                content = child.report(POLL_S)
                report = _REPORTS.decode(content) if content is not None else None
                match report:
                    case Started():
                        started, watch = True, _Watch(self._patience)
                        self._say_up(EngineUp(self.index, incarnation, report.address, report.ready))
                    case Failed():
                        problem = report.message
                        self._say_failed(report)
                    case Pulse() if watch is not None:
                        watch.note(report)
                        self._publish(EngineLoadReport(self.index, report.num_running, report.num_waiting))
                if watch is not None and watch.stalled != stalled:
                    stalled = watch.stalled
                    logger.warning("engine core %d %s", self.index, "has stalled" if stalled else "goes on again")
                    self._publish(EngineStalled(self.index, incarnation, stalled))
                if watch is not None and watch.hung:
                    problem = "it hung and was killed"
                    dump_stacks(child.pid)
                    child.kill()
                    break
        except EOFError:
            status = child.stop(ask_s=1.0)
            problem = problem or describe_exit(status)
        finally:
            child.stop(ask_s=0.0)
        if not self._first.done() and problem is not None:
            self._first.set_exception(EngineDeadError(f"the engine core could not start: {problem}"))
        return started, problem or "it was stopped"

    def _say_up(self, event: EngineUp) -> None:
        if self._first.done():
            logger.info("engine core %d is back", self.index)
        else:
            self._first.set_result(event)
        self._publish(event)

    def _say_failed(self, report: Failed) -> None:
        if not self._first.done():
            kind = _USERS_TO_MEND.get(report.kind, EngineDeadError)
            self._first.set_exception(kind(report.message))


def dump_stacks(pid: int) -> None:
    """Let a process and all its children write the stacks of their threads to stderr."""
    try:
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        logger.error("stacks of process %d (%s):", process.pid, " ".join(process.cmdline()[:1]))
        process.send_signal(STACKS_SIGNAL)
    time.sleep(DUMP_S)
