"""`ApiServerPool`: front ends in processes of their own on one socket, started again when they die or are stopped.

Does not know what a front end does. The engines are told when one is gone, so that nobody works for it.
"""

import math
import signal
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from pagemill.errors import EngineDeadError, HandshakeError, PeerGoneError
from pagemill.fleet.api_server import ApiServerSpec
from pagemill.log import get_logger
from pagemill.messages.core_calls import EngineCall, FrontEndGone
from pagemill.messages.metrics import FrontEndCounts
from pagemill.messages.process_reports import FrontEndReport, Listening
from pagemill.observability.metrics_pool import MetricsPool
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.liveness import Pauses
from pagemill.transport.shm_load import Load, SharedLoad, create_load
from pagemill.transport.sockets import ClientSocket
from pagemill.utils.awake_clock import AwakeClock
from pagemill.utils.processes import Child, describe_exit

logger = get_logger(__name__)

ENTRY = "pagemill.fleet.api_server:run"
POLL_S = 0.25
MAX_GAP_S = 1.0
"""Between two looks at a front end. A longer gap tells that this process itself did not run."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before a start that failed is tried again: the first, and the most that it grows to."""
MAX_FAILED_STARTS = 7
"""Starts in a row that may fail before a front end is given up: after a minute or more, with the pauses."""
SILENT_S = 30.0
"""Without a pulse, which comes every second from a thread of its own, until a front end is replaced: it is stopped."""
TELL_S = 2.0
HURRY_S = 3.0
"""What front ends get to end at once."""
STOP_POLL_S = 0.05

_REPORTS: msgspec.msgpack.Decoder[FrontEndReport] = msgspec.msgpack.Decoder(FrontEndReport)


class ApiServerPool:
    """Keeps `count` front ends alive, each on a thread of its own, until `stop`. They count what they have in flight
    in memory that they share; what a front end had that died is forgotten.

    `birth(index)` is what a front end is given; `engines()` are the addresses of those to be told of a death. What
    front ends have counted goes into `pool`. One that shows no sign of life for `silent_s` seconds is replaced.
    `on_lost` is called, on a thread of this, when the last is given up.
    """

    def __init__(
        self,
        count: int,
        birth: Callable[[int], ApiServerSpec],
        sock: socket.socket,
        engines: Callable[[], list[str]],
        pool: MetricsPool,
        *,
        silent_s: float = SILENT_S,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._birth = birth
        self._sock = sock
        self._engines = engines
        self._pool = pool
        self._silent_s = silent_s
        self._on_lost = on_lost
        self._given_up: set[int] = set()
        self._load_fd = create_load(count)
        self._load = SharedLoad(self._load_fd)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._children: dict[int, Child] = {}
        self._listening = [threading.Event() for _ in range(count)]
        self._problem: str | None = None
        self._threads = [
            threading.Thread(target=self._keep, args=(index,), name=f"pagemill-api-{index}", daemon=True)
            for index in range(count)
        ]

    def start(self) -> None:
        """Start all; does not wait."""
        for thread in self._threads:
            thread.start()

    def wait_listening(self) -> None:
        """Wait until all take requests. Raises EngineDeadError when one dies before."""
        for listening in self._listening:
            listening.wait()
        if self._problem is not None:
            raise EngineDeadError(self._problem)

    def pids(self) -> dict[int, int]:
        """Index -> process."""
        return {index: child.pid for index, child in self._children.items()}

    def stop(self, drain_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Let all drain, then end them; once `hurry()` is true, they end at once. A second call does nothing."""
        with self._lock:
            self._stopping.set()
            self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + drain_s
        hurried = False
        while self._are_alive() and time.monotonic() < deadline:
            if not hurried and hurry():
                hurried, deadline = True, time.monotonic() + HURRY_S
                self._signal_all(signal.SIGTERM)
            time.sleep(STOP_POLL_S)
        self._signal_all(signal.SIGKILL)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._load.close()

    def _are_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _signal_all(self, number: int) -> None:
        for child in list(self._children.values()):
            child.signal(signal.SIGCONT)  # a stopped process gets no SIGTERM before it goes on
            child.signal(number)

    def _keep(self, index: int) -> None:
        try:
            self._keep_alive(index)
        except Exception as error:  # nobody may wait for a front end that nobody watches
            logger.exception("api server %d is not watched any more", index)
            if self._listening[index].is_set():
                self._lose(index)
            else:
                self._give_up(index, f"{type(error).__name__}: {error}")

    def _give_up(self, index: int, reason: str) -> None:
        self._problem = f"api server {index} could not start: {reason}"
        self._listening[index].set()

    def _start(self, index: int) -> Child | None:
        """None: it is too late. Raises OSError when no process can be made."""
        birth = msgspec.msgpack.encode(msgspec.structs.replace(self._birth(index), load_fd=self._load_fd))
        with self._lock:  # what is started while all are told to stop would not hear it
            if self._stopping.is_set():
                return None
            child = Child(ENTRY, f"pagemill: api server {index}", birth, pass_fds=[self._sock.fileno(), self._load_fd])
            self._children[index] = child
            return child

    def _keep_alive(self, index: int) -> None:
        pauses, num_failed = Pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while True:
            listened, reason = self._live(index)
            if self._stopping.is_set():
                break
            if not self._listening[index].is_set():
                logger.error("api server %d is gone: %s", index, reason)
                self._give_up(index, reason)
                break
            if listened:
                pauses.reset()
            num_failed, pause_s = (0, 0.0) if listened else (num_failed + 1, pauses.next())
            final = num_failed >= MAX_FAILED_STARTS
            what_next = "it is given up" if final else f"starting it again{f' in {pause_s:g} s' if pause_s else ''}"
            logger.error("api server %d is gone: %s; %s", index, reason, what_next)
            self._tell_engines(index)
            if final:
                self._lose(index)
            if final or self._stopping.wait(pause_s):
                break

    @property
    def lost(self) -> bool:
        """Whether all were given up."""
        return len(self._given_up) == len(self._threads)

    def _lose(self, index: int) -> None:
        self._given_up.add(index)
        if self.lost:
            logger.error("no api server is left, and none can be started again: the server ends")
            self._on_lost()

    def _live(self, index: int) -> tuple[bool, str]:
        """One process from birth to death: whether it listened, and why it ended."""
        try:
            child = self._start(index)
        except OSError as error:  # there are no descriptors left, or no memory: that may pass
            return False, f"no process can be made: {error}"
        if child is None:
            return False, "it was stopped"
        try:
            return self._watch(index, child)
        finally:
            child.stop(ask_s=0.0)
            self._pool.lost(index)
            self._load.set(index, Load(0, 0))

    def _watch(self, index: int, child: Child) -> tuple[bool, str]:
        """Until it ends, or shows no sign of life: whether it listened, and why it ended."""
        clock, listened, last_sign = AwakeClock(MAX_GAP_S), False, math.inf
        try:
            while True:
                report = self._next_report(index, child)
                if report is not None:
                    last_sign = clock.now()  # from the first one on: pulses come since then
                match report:
                    case Listening():
                        listened = True
                        self._listening[index].set()
                    case FrontEndCounts() as counts:
                        self._pool.take(index, counts)
                if clock.now() - last_sign > self._silent_s:
                    child.kill()
                    return listened, f"it gave no sign of life for {self._silent_s:g} s and was killed"
        except EOFError:
            return listened, describe_exit(child.stop(ask_s=1.0))

    def _next_report(self, index: int, child: Child) -> FrontEndReport | None:
        """What a front end says next, if it says something. Raises EOFError when it is gone."""
        content = child.report(POLL_S)
        try:
            return _REPORTS.decode(content) if content is not None else None
        except msgspec.DecodeError as error:
            logger.error("dropped a report of api server %d: %s", index, error)
            return None

    def _tell_engines(self, index: int) -> None:
        birth = self._birth(index)
        hello = Hello(secret=birth.secret, role=Role.SUPERVISOR, index=0)
        message = Codec[EngineCall](EngineCall).encode(FrontEndGone(index))
        for address in self._engines():
            try:
                connection = ClientSocket(address, hello, timeout_s=TELL_S)
                connection.send(message)
                connection.close()
            except (HandshakeError, PeerGoneError) as error:
                logger.warning("an engine could not be told that api server %d is gone: %s", index, error)
