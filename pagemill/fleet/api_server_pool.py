"""`ApiServerPool`: API servers in processes of their own on one socket, started again when they die or are stopped.

Does not know what an API server does. The engines are told when one is gone, so that they stop working for it.
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
from pagemill.messages.fleet import AbortOrder, DrainOrder, FrontEndOrder, HaltOrder
from pagemill.messages.metrics import FrontEndCounts
from pagemill.messages.process_reports import FrontEndReport, Listening
from pagemill.observability.metrics_pool import MetricsPool
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.shm_load import SharedLoad, create_load
from pagemill.transport.sockets import ClientSocket
from pagemill.utils.children import Restarts, WatchedChild
from pagemill.utils.processes import Child

logger = get_logger(__name__)

ENTRY = "pagemill.fleet.api_server:run"
SILENT_S = 30.0
"""Without a pulse, which comes every second from a thread of its own, until an API server is replaced: it is
stopped."""
START_S = 3600.0
"""Until the first pulse of a process, which comes once its code is loaded; 0: no limit."""
NOTIFY_TIMEOUT_S = 2.0
"""What connecting to an engine may take, to tell it that an API server is gone."""
FORCED_STOP_S = 3.0
"""What API servers get to end once they are not to drain any more."""
STOP_POLL_S = 0.05

_REPORTS: msgspec.msgpack.Decoder[FrontEndReport] = msgspec.msgpack.Decoder(FrontEndReport)


class ApiServerPool:
    """Keeps `count` API servers alive, each watched by a thread of its own, until `stop`. They count what they have in
    flight in shared memory; the counts of one that died are reset.

    `spec(index)` is what an API server is given; `engines()` returns the addresses to notify when one dies. What they
    count goes into `metrics`; what one tells the others goes to `relay`. What clients have in flight is
    counted for `num_clients` of them. One that shows no sign of life for `silent_s`
    seconds, or none at all within `start_s`, is replaced. `on_lost` is called, on one of those threads, when the last
    is given up.
    """

    def __init__(
        self,
        count: int,
        spec: Callable[[int], ApiServerSpec],
        sock: socket.socket,
        engines: Callable[[], list[str]],
        metrics: MetricsPool,
        relay: Callable[[FrontEndOrder], None] = lambda order: None,
        *,
        num_clients: int = 1,
        silent_s: float = SILENT_S,
        start_s: float = START_S,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._sock = sock
        self._engines = engines
        self._metrics = metrics
        self._relay = relay
        self._silent_s = silent_s
        self._start_s = start_s or math.inf
        self._on_lost = on_lost
        self._given_up: set[int] = set()
        self._load_fd = create_load(count, num_clients)
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
        """Process ids, by index."""
        return {index: child.pid for index, child in self._children.items()}

    def stop(self, drain_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Let all drain, then end them; once `hurry()` is true, they end at once. A second call does nothing."""
        with self._lock:
            self._stopping.set()
            self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + drain_s
        is_forced = False
        while self._are_alive() and time.monotonic() < deadline:
            if not is_forced and hurry():
                is_forced = True
                deadline = time.monotonic() + FORCED_STOP_S
                self._signal_all(signal.SIGTERM)
            time.sleep(STOP_POLL_S)
        self._signal_all(signal.SIGKILL)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._load.close()

    @property
    def lost(self) -> bool:
        """Whether all were given up."""
        return len(self._given_up) == len(self._threads)

    def _are_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _signal_all(self, number: int) -> None:
        for child in list(self._children.values()):
            child.signal(signal.SIGCONT)  # a stopped process gets no SIGTERM before it goes on
            child.signal(number)

    def _keep(self, index: int) -> None:
        try:
            self._keep_alive(index)
        except Exception as error:  # nobody may wait for an API server that nobody watches
            logger.exception("api server %d is not watched any more", index)
            if self._listening[index].is_set():
                self._give_up(index)
            else:
                self._fail_first_start(index, f"{type(error).__name__}: {error}")

    def _keep_alive(self, index: int) -> None:
        """Start one API server, again and again, until `stop`, or it is given up."""
        restarts = Restarts()
        while True:
            listened, reason = self._run_once(index)
            if self._stopping.is_set():
                return
            if not self._listening[index].is_set():
                logger.error("api server %d is gone: %s", index, reason)
                self._fail_first_start(index, reason)
                return
            restart = restarts.after_end(had_started=listened)
            logger.error("api server %d is gone: %s; %s", index, reason, restart)
            self._notify_engines(index)
            if restart.is_final:
                self._give_up(index)
                return
            if self._stopping.wait(restart.pause_s):
                return

    def _fail_first_start(self, index: int, reason: str) -> None:
        """Let `wait_listening` raise."""
        self._problem = f"api server {index} could not start: {reason}"
        self._listening[index].set()

    def _give_up(self, index: int) -> None:
        self._given_up.add(index)
        if self.lost:
            logger.error("no api server is left, and none can be started again: the server ends")
            self._on_lost()

    def _run_once(self, index: int) -> tuple[bool, str]:
        """Start one process and watch it until it has ended. Returns whether it listened, and why it ended."""
        try:
            child = self._start(index)
        except OSError as error:  # there are no descriptors left, or no memory: that may pass
            return False, f"no process can be made: {error}"
        if child is None:
            return False, "it was stopped"
        try:
            return self._watch(index, WatchedChild(child, _REPORTS))
        finally:
            child.stop(grace_s=0.0)
            self._metrics.lost(index)
            self._load.clear(index)

    def _start(self, index: int) -> Child | None:
        """A new process; None after `stop`. Raises OSError when no process can be made."""
        payload = msgspec.msgpack.encode(msgspec.structs.replace(self._spec(index), load_fd=self._load_fd))
        with self._lock:  # `stop` signals those that there are: none may come after
            if self._stopping.is_set():
                return None
            fds = [self._sock.fileno(), self._load_fd]
            child = Child(ENTRY, f"pagemill: api server {index}", payload, pass_fds=fds)
            self._children[index] = child
            return child

    def _watch(self, index: int, watched: WatchedChild[FrontEndReport]) -> tuple[bool, str]:
        """Read the reports of a process until it ends, or shows no sign of life. Returns whether it listened, and why
        it ended."""
        listened = False
        for report in watched.reports():
            match report:
                case Listening():
                    listened = True
                    self._listening[index].set()
                case FrontEndCounts() as counts:
                    self._metrics.take(index, counts)
                case AbortOrder() | HaltOrder() | DrainOrder():
                    self._relay(report)
            limit_s = self._silent_s if watched.has_reported else self._start_s
            if watched.silent_s > limit_s:
                watched.child.kill()
                return listened, f"it gave no sign of life for {limit_s:g} s and was killed"
        return listened, watched.end()

    def _notify_engines(self, index: int) -> None:
        """Tell the engines that an API server is gone, so that they abort what it has asked for."""
        hello = Hello(secret=self._spec(index).secret, role=Role.SUPERVISOR, index=0)
        message = Codec[EngineCall](EngineCall).encode(FrontEndGone(index))
        for address in self._engines():
            try:
                connection = ClientSocket(address, hello, timeout_s=NOTIFY_TIMEOUT_S)
                connection.send(message)
                connection.close()
            except (HandshakeError, PeerGoneError) as error:
                logger.warning("an engine could not be told that api server %d is gone: %s", index, error)
