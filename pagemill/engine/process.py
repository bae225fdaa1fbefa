"""An engine core in a process of its own: one thread steps the core, one serves its socket, one sends a pulse.

Does not know who its front ends are until they introduce themselves, nor how it was started or will be replaced.
"""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from pagemill.config.engine_config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.core_loop import CoreLoop
from pagemill.engine.executor.factory import make_executor
from pagemill.engine.waves import WaveMember
from pagemill.errors import EngineDeadError, PagemillError, PeerGoneError, TransportError
from pagemill.log import get_logger, name_process
from pagemill.messages.core_calls import (
    CallResult,
    EngineCall,
    EngineReport,
    FrontEndGone,
    NamedCall,
    NamedRequests,
    Names,
    StepOutputs,
)
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs
from pagemill.messages.process_reports import Failed, ProcessReport, Pulse, Started
from pagemill.messages.waves import WaveOrder, WaveReport
from pagemill.messages.worker_rank import Replicas
from pagemill.transport.codec import Codec, Frame
from pagemill.transport.handshake import Role
from pagemill.transport.sockets import Peer, ServerSocket
from pagemill.utils.children import start_heartbeat
from pagemill.utils.cpu_affinity import current_cpus, pin_to
from pagemill.utils.gc_pause import gc_paused
from pagemill.utils.processes import Report
from pagemill.utils.queues import waiting_items

logger = get_logger(__name__)

PULSE_S = 0.2
POLL_S = 5.0
_ENCODER = msgspec.msgpack.Encoder()


class CoreSpec(msgspec.Struct, frozen=True):
    """What the process of a core is given."""

    config: EngineConfig
    index: int
    worker: str
    """"module:callable" that makes a worker."""
    address: str
    """Where it listens for front ends."""
    secret: str
    lockstep: bool = False
    """Whether it steps together with other engines, by the orders of a coordinator."""
    replicas: Replicas | None = None
    """Where its workers connect to those of other engines, if they share their experts."""


class CoreServer:
    """The thread that owns the socket of a core: calls in, reports out.

    Every connection of a front end has a number of its own, and what is asked over it belongs to it: when a connection
    is lost, its requests are aborted, and what still comes out of them is dropped, even if the front end is back.
    """

    def __init__(self, socket: ServerSocket, cpus: frozenset[int] = frozenset()) -> None:
        """`cpus`: where its thread runs, if the caller's thread is pinned to compute; empty: where the caller's
        does."""
        self._socket = socket
        self._cpus = cpus
        self._outbox: SimpleQueue[tuple[int | Role, EngineReport]] = SimpleQueue()
        self._calls: Codec[EngineCall] = Codec(EngineCall)
        self._names: Codec[Names] = Codec(Names)
        self._reports: Codec[EngineReport] = Codec(EngineReport)
        self._peers: dict[int | Role, Peer] = {}
        """Front ends by the number of their connection, and the coordinator by its role."""
        self._numbers: dict[Peer, int] = {}
        """The numbers of the connections of front ends."""
        self._next_number = itertools.count()
        self._closing = False
        self._thread: threading.Thread | None = None

    def send(self, recipient: int, report: EngineReport) -> None:
        """Send over a connection of a front end; for one that is gone the report is dropped. From any thread, never
        blocks."""
        self._outbox.put((recipient, report))
        self._socket.wake()

    def send_to_coordinator(self, report: WaveReport) -> None:
        """Send to the coordinator of the engines. From any thread, never blocks."""
        self._outbox.put((Role.COORDINATOR, report))
        self._socket.wake()

    def start(self, loop: CoreLoop) -> None:
        """Begin to put calls into the inbox of the loop."""
        self._socket.watch(
            joined=lambda peer: self._on_connected(loop, peer), lost=lambda *peer: self._on_lost(loop, *peer)
        )
        self._thread = threading.Thread(target=self._run, args=(loop,), name="pagemill-core-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is in the outbox, then stop."""
        self._closing = True
        self._socket.wake()
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def _run(self, loop: CoreLoop) -> None:
        pin_to(self._cpus)
        try:
            while not self._closing:
                received = self._socket.receive(POLL_S)
                if received is not None:
                    self._dispatch(loop, *received)
                self._flush_outbox()
            self._flush_outbox()
        except Exception as error:  # a core that nobody can reach would look well and answer nobody
            logger.exception("the engine core cannot send or receive any more")
            loop.fail(EngineDeadError(f"its connections failed: {type(error).__name__}: {error}"))

    def _on_connected(self, loop: CoreLoop, peer: Peer) -> None:
        if peer.role is Role.COORDINATOR:
            self._peers[Role.COORDINATOR] = peer
        if peer.role is Role.API_SERVER:
            for former in [known for known in self._numbers if known.index == peer.index]:
                self._socket.forget(former)
                self._on_lost(loop, former, "it connected again")
            number = next(self._next_number)
            self._numbers[peer] = number
            self._peers[number] = peer

    def _on_lost(self, loop: CoreLoop, peer: Peer, why: str) -> None:
        """A connection is lost: nobody reads what was asked for over it."""
        if peer.role is Role.COORDINATOR and self._peers.get(Role.COORDINATOR) == peer:
            del self._peers[Role.COORDINATOR]
        number = self._numbers.pop(peer, None)
        if number is not None:
            logger.info("the connection of %s is lost (%s); its requests are aborted", peer, why)
            del self._peers[number]
            loop.inbox.put((number, FrontEndGone(number)))

    def _dispatch(self, loop: CoreLoop, peer: Peer, frames: list[Frame]) -> None:
        try:
            call = self._calls.decode(frames)
        except TransportError as error:
            self._on_unreadable(loop, peer, frames, error)
            return
        if isinstance(call, WaveOrder) is not (peer.role is Role.COORDINATOR):
            logger.warning("dropped a message of %s: waves, and nothing else, are the coordinator's", peer)
        elif isinstance(call, FrontEndGone):
            self._on_front_end_gone(loop, peer, call.index)
        elif peer.role is Role.SUPERVISOR:
            logger.warning("dropped a message of %s: it may only report front ends that are gone", peer)
        else:
            loop.inbox.put((self._numbers.get(peer, peer.index), call))

    def _on_front_end_gone(self, loop: CoreLoop, peer: Peer, index: int) -> None:
        """The supervisor reports that a front end died; nobody else may."""
        if peer.role is not Role.SUPERVISOR:
            logger.warning("dropped a message of %s: only the supervisor may say who is gone", peer)
            return
        for known in [known for known in self._numbers if known.index == index]:
            self._socket.forget(known)
            self._on_lost(loop, known, "its process ended")

    def _on_unreadable(self, loop: CoreLoop, peer: Peer, frames: list[Frame], error: TransportError) -> None:
        """A message that cannot be decoded. If its names can be, the front end is told that its requests or its call
        failed; otherwise the connection is given up, and the front end sends again what it needs."""
        logger.warning("dropped a message of %s: %s", peer, error)
        number = self._numbers.get(peer)
        if number is None:
            return
        try:
            names = self._names.decode(frames)
        except TransportError:
            self._socket.forget(peer)
            self._on_lost(loop, peer, "it sent what cannot be read")
            return
        match names:
            case NamedRequests(requests):
                message = "the engine could not read the request"
                failed = [EngineCoreOutput.failed(request.request_id, message) for request in requests]
                self.send(number, StepOutputs(EngineCoreOutputs(outputs=failed)))
            case NamedCall(call_id):
                self.send(number, CallResult(call_id, error="ValueError: the engine could not read the call"))

    def _flush_outbox(self) -> None:
        for recipient, report in waiting_items(self._outbox):
            peer = self._peers.get(recipient)
            if peer is not None:
                with contextlib.suppress(PeerGoneError):  # `_on_lost` is called for it
                    self._socket.send(peer, self._reports.encode(report))


def run(payload: bytes, report: Report) -> None:
    """Entry of the process (utils/processes.py). Ends when told to by SIGTERM, or with an error."""

    def send_report(message: ProcessReport) -> None:
        report(_ENCODER.encode(message))

    spec = msgspec.msgpack.decode(payload, type=CoreSpec)
    name_process(f"core {spec.index}")
    cpus = current_cpus()  # the core pins its thread below: other threads stay where they may run now
    try:
        socket = ServerSocket(spec.address, spec.secret, accepts=(Role.API_SERVER, Role.SUPERVISOR, Role.COORDINATOR))
        with gc_paused():
            executor = make_executor(spec.config, spec.worker, replica=spec.index, replicas=spec.replicas)
            core = EngineCore(spec.config, executor, data_parallel_rank=spec.index)
    except Exception as error:
        logger.debug("the engine core cannot start", exc_info=True)
        send_report(Failed(type(error).__name__, str(error)))
        raise SystemExit(1) from error
    server = CoreServer(socket, cpus)
    waves = WaveMember(core.has_work, server.send_to_coordinator) if spec.lockstep else None
    # What workers prepare may exchange data between replicas, which then have to do it together.
    loop = CoreLoop(core, server.send, waves, core.prepare_more if waves is None else None)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    server.start(loop)
    send_report(Started(socket.address, core.ready))
    start_heartbeat(lambda: _pulse(core, loop, send_report), PULSE_S, cpus)
    try:
        loop.run()
    except EngineDeadError:
        logger.exception("the engine core died")
        raise SystemExit(1) from None
    finally:
        server.close()
        core.shutdown()


def _pulse(core: EngineCore, loop: CoreLoop, send_report: Callable[[ProcessReport], None]) -> bool:
    """Report a sign of life; False once the core is dead, which ends the loop."""
    send_report(Pulse(loop.num_steps, loop.idle, loop.stats))
    try:
        core.check_health()
    except PagemillError as error:
        loop.fail(EngineDeadError(str(error)))
        return False
    return True
