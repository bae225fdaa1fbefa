"""`EngineSupervisor`: starts an engine core in a process of its own, watches it, and starts it again when it dies.

Does not know what a core does, nor who its clients are: it publishes what becomes of it as events.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from pagemill.errors import EngineDeadError, start_error
from pagemill.fleet.stacks import ask_for_stacks
from pagemill.log import get_logger
from pagemill.messages.fleet import EngineDown, EngineLoadReport, EngineStalled, EngineUp, FleetEvent
from pagemill.messages.process_reports import Failed, ProcessReport, Pulse, Started
from pagemill.utils.awake_clock import AwakeClock
from pagemill.utils.children import Restarts, WatchedChild
from pagemill.utils.processes import Child
from pagemill.utils.stacks import write_stacks

logger = get_logger(__name__)

CORE = "pagemill.engine.process:run"
MAX_GAP_S = 1.0
"""Between two looks at an engine. A longer gap tells that this process itself did not run."""
_REPORTS: msgspec.msgpack.Decoder[ProcessReport] = msgspec.msgpack.Decoder(ProcessReport)


@dataclass(frozen=True)
class LivenessTimeouts:
    """How long a process may show no sign of life, in seconds for which the supervisor itself was running: while that
    is stopped, as in a paused container, no time passes."""

    stalled_s: float = 60.0
    """Seconds without a finished step, while work is pending, before the engine counts as stalled; 0: never."""
    hung_s: float = 300.0
    """Seconds without a finished step, while work is pending, before it is killed and started again; 0: it is never
    killed once it is up, for whatever reason."""
    silent_s: float = 10.0
    """Seconds without a pulse before the engine counts as stalled; it is killed after three times as long. A pulse
    comes from a thread of its own: its absence means that the whole process is stopped."""
    start_s: float = 3600.0
    """Seconds that a start may take before the process is killed; 0: no limit."""

    @property
    def silent_until_killed_s(self) -> float:
        """Seconds without a pulse before the engine is killed."""
        return 3 * self.silent_s if self.hung_s else math.inf


class _Liveness:
    """One incarnation's signs of life, once it is up. `is_stalled` and `is_hung` are asked at least every
    `MAX_GAP_S`."""

    def __init__(self, timeouts: LivenessTimeouts) -> None:
        self._timeouts = timeouts
        self._clock = AwakeClock(MAX_GAP_S)
        self._last_pulse = self._clock.now()
        self._last_progress = self._last_pulse
        self._num_steps = -1
        self._is_idle = True

    def on_pulse(self, pulse: Pulse) -> None:
        now = self._clock.now()
        self._last_pulse = now
        if pulse.idle or self._is_idle or pulse.num_steps != self._num_steps:
            self._last_progress = now
        self._num_steps = pulse.num_steps
        self._is_idle = pulse.idle

    @property
    def is_stalled(self) -> bool:
        return self._exceeds(self._timeouts.stalled_s, self._timeouts.silent_s)

    @property
    def is_hung(self) -> bool:
        return self._exceeds(self._timeouts.hung_s, self._timeouts.silent_until_killed_s)

    def _exceeds(self, progress_s: float, pulse_s: float) -> bool:
        now = self._clock.now()
        is_stuck = not self._is_idle and now - self._last_progress > (progress_s or math.inf)
        return is_stuck or now - self._last_pulse > pulse_s


class _Incarnation:
    """One process of an engine, and what its supervisor has learnt of it."""

    def __init__(self, number: int, child: Child) -> None:
        self.number = number
        self.watched = WatchedChild(child, _REPORTS)
        self.liveness: _Liveness | None = None
        """None until it has started."""
        self.is_stalled = False
        self.problem: str | None = None
        """Why it ended or was killed, where that is known better than from its exit status."""


class EngineSupervisor:
    """Keeps one engine alive, on a thread of its own, until `stop`.

    `payload(incarnation)` is what the core's process is given; `publish` is called on the supervisor's thread.
    """

    def __init__(
        self,
        index: int,
        payload: Callable[[int], bytes],
        publish: Callable[[FleetEvent], None],
        timeouts: LivenessTimeouts,
        entry: str = CORE,
    ) -> None:
        self.index = index
        self._payload = payload
        self._publish = publish
        self._timeouts = timeouts
        self._entry = entry
        self._stopping = threading.Event()
        self._to_replace: tuple[int, str] = (-1, "")
        """An incarnation that is to be killed, and why."""
        self._first: Future[EngineUp] = Future()
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._run, name=f"pagemill-supervisor-{index}", daemon=True)

    def start(self) -> None:
        """Begin to start the engine; `first_up` waits for the result."""
        self._thread.start()

    def first_up(self) -> EngineUp:
        """Wait until the engine is ready for the first time. Raises what kept it from starting: ConfigError,
        ModelError, or EngineDeadError for anything that the user's settings have not caused."""
        return self._first.result()

    @property
    def pid(self) -> int | None:
        """Process id of the present incarnation."""
        return None if self._child is None else self._child.pid

    def ask_to_stop(self) -> None:
        """Begin to end the engine; `stop` waits until it has ended."""
        self._stopping.set()

    def replace(self, incarnation: int, reason: str) -> None:
        """Kill this incarnation, if it is still the present one, and start the next."""
        self._to_replace = (incarnation, reason)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the engine and the thread. A second call does nothing."""
        self.ask_to_stop()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        restarts = Restarts()
        incarnation = 0
        while True:
            had_started, reason = self._run_once(incarnation)
            if self._stopping.is_set() or not (had_started or incarnation):
                break
            restart = restarts.after_end(had_started=had_started)
            logger.error("engine core %d is gone: %s; %s", self.index, reason, restart)
            self._publish(
                EngineDown(
                    self.index, incarnation, reason, restart.is_final, num_failed_starts=restart.num_failed_starts
                )
            )
            if restart.is_final or self._stopping.wait(restart.pause_s):
                break
            incarnation += 1
        if not self._first.done():
            self._first.set_exception(EngineDeadError("the engine was stopped while it started"))

    def _run_once(self, number: int) -> tuple[bool, str]:
        """Start one incarnation and watch it until it has ended. Returns whether it ever was ready, and why it
        ended."""
        try:
            child = self._child = Child(self._entry, f"pagemill: engine core {self.index}", self._payload(number))
            incarnation = _Incarnation(number, child)
            try:
                self._watch(incarnation)
            finally:
                child.stop(grace_s=0.0)
        except Exception as error:  # whatever it is, the engine must not be left without a supervisor
            logger.exception("engine core %d could not be started or watched", self.index)
            reason = f"{type(error).__name__}: {error}"
            self._fail_first_start(EngineDeadError(f"the engine core could not start: {reason}"))
            return False, reason
        if incarnation.problem is not None:
            self._fail_first_start(EngineDeadError(f"the engine core could not start: {incarnation.problem}"))
        return incarnation.liveness is not None, incarnation.problem or "it was stopped"

    def _watch(self, incarnation: _Incarnation) -> None:
        """Act on the reports of an incarnation, and on their absence, until it ends, is killed, or `stop`."""
        for report in incarnation.watched.reports():
            if self._stopping.is_set():
                return
            self._act_on(incarnation, report)
            self._look_for_stall(incarnation)
            problem = self._reason_to_kill(incarnation)
            if problem is not None:
                incarnation.problem = problem
                incarnation.watched.child.kill()
                return
        status = incarnation.watched.end()
        incarnation.problem = incarnation.problem or status

    def _act_on(self, incarnation: _Incarnation, report: ProcessReport | None) -> None:
        match report:
            case Started():
                incarnation.liveness = _Liveness(self._timeouts)
                self._publish_up(EngineUp(self.index, incarnation.number, report.address, report.ready))
            case Failed():
                incarnation.problem = report.message
                self._fail_first_start(start_error(report.kind)(report.message))
            case Pulse() if incarnation.liveness is not None:
                incarnation.liveness.on_pulse(report)
                self._publish(EngineLoadReport(self.index, report.stats))

    def _look_for_stall(self, incarnation: _Incarnation) -> None:
        """Publish when an engine stalls, and when it continues."""
        is_stalled = incarnation.liveness is not None and incarnation.liveness.is_stalled
        if is_stalled == incarnation.is_stalled:
            return
        incarnation.is_stalled = is_stalled
        self._publish(EngineStalled(self.index, incarnation.number, is_stalled))
        if not is_stalled:
            logger.warning("engine core %d goes on again", self.index)
            return
        logger.error("engine core %d has stalled: no sign of life, or work and no finished step", self.index)
        ask_for_stacks(incarnation.watched.child.pid, last=False)
        write_stacks()  # of this process, which serves or supervises

    def _reason_to_kill(self, incarnation: _Incarnation) -> str | None:
        """Why an incarnation must end now; None: it need not."""
        number, reason = self._to_replace
        if number == incarnation.number:
            return reason
        pid = incarnation.watched.child.pid
        if incarnation.liveness is None:
            limit_s = self._timeouts.start_s or math.inf
            if incarnation.watched.silent_s <= limit_s:
                return None
            ask_for_stacks(pid, last=True)
            return f"it was not ready {limit_s:g} s after its start and was killed (--engine-start-timeout)"
        if incarnation.liveness.is_hung:
            ask_for_stacks(pid, last=True)
            return "it hung and was killed"
        return None

    def _publish_up(self, event: EngineUp) -> None:
        if self._first.done():
            logger.info("engine core %d is back", self.index)
        else:
            self._first.set_result(event)
        self._publish(event)

    def _fail_first_start(self, error: Exception) -> None:
        """Let `first_up` raise; after the first start nobody waits there."""
        if not self._first.done():
            self._first.set_exception(error)
