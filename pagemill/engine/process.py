"""An engine core in a process of its own: one thread steps the core, one carries the mail, one gives a pulse.

Does not know who its front ends are until they introduce themselves, nor how it was started or will be replaced.
"""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

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
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, Finish, FinishReason
from pagemill.messages.process_reports import Failed, ProcessReport, Pulse, Started
from pagemill.messages.waves import WaveNews, WaveOrder
from pagemill.messages.worker_rank import Replicas
from pagemill.transport.codec import Codec, Frame
from pagemill.transport.handshake import Role
from pagemill.transport.sockets import Peer, ServerSocket
from pagemill.utils.collector import paused
from pagemill.utils.cpu_affinity import current_cpus, keep_to
from pagemill.utils.processes import Report

logger = get_logger(__name__)

PULSE_S = 0.2
MAIL_POLL_S = 5.0
_ENCODER = msgspec.msgpack.Encoder()


class CoreSpec(msgspec.Struct, frozen=True):
    """What the process of a core is given."""

    config: EngineConfig
    index: int
    worker: str
    """"module:callable" that makes a worker."""
    address: str
    """Where it shall listen for front ends."""
    secret: str
    lockstep: bool = False
    """Whether it steps together with other engines, as a coordinator says."""
    replicas: Replicas | None = None
    """Where its workers meet those of other engines, over which experts are dealt out."""


class MailRoom:
    """The thread that owns the socket: letters in, reports out.

    Every connection of a front end has a number of its own, and what is asked for belongs to it: when a connection is
    lost, its requests are aborted, and what still comes out of them reaches nobody, even if the front end is back.
    """

    def __init__(self, socket: ServerSocket, cpus: frozenset[int] = frozenset()) -> None:
        """`cpus`: those of its thread, which are not the caller's where that one computes; none: as the caller's."""
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

    def post(self, recipient: int, report: EngineReport) -> None:
        """Send over a connection of a front end; one that is gone gets nothing. From any thread, never blocks."""
        self._outbox.put((recipient, report))
        self._socket.wake()

    def tell_coordinator(self, news: WaveNews) -> None:
        """Send to the coordinator of the engines. From any thread, never blocks."""
        self._outbox.put((Role.COORDINATOR, news))
        self._socket.wake()

    def open(self, loop: CoreLoop) -> None:
        """Begin to put letters into the inbox of the loop."""
        self._socket.watch(joined=lambda peer: self._welcome(loop, peer), lost=lambda *peer: self._lose(loop, *peer))
        self._thread = threading.Thread(target=self._run, args=(loop,), name="pagemill-mail", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what was posted, then stop."""
        self._closing = True
        self._socket.wake()
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def _run(self, loop: CoreLoop) -> None:
        keep_to(self._cpus)
        try:
            while not self._closing:
                received = self._socket.receive(MAIL_POLL_S)
                if received is not None:
                    self._sort(loop, *received)
                self._send_posted()
            self._send_posted()
        except Exception as error:  # a core without mail would look well and answer nobody
            logger.exception("the engine core cannot send or receive any more")
            loop.fail(EngineDeadError(f"mail failed: {type(error).__name__}: {error}"))

    def _welcome(self, loop: CoreLoop, peer: Peer) -> None:
        if peer.role is Role.COORDINATOR:
            self._peers[Role.COORDINATOR] = peer
        if peer.role is Role.API_SERVER:
            for former in [known for known in self._numbers if known.index == peer.index]:
                self._socket.forget(former)
                self._lose(loop, former, "it connected again")
            number = self._numbers[peer] = next(self._next_number)
            self._peers[number] = peer

    def _lose(self, loop: CoreLoop, peer: Peer, why: str) -> None:
        """A connection is lost: nobody reads what was asked for over it."""
        if peer.role is Role.COORDINATOR and self._peers.get(Role.COORDINATOR) == peer:
            del self._peers[Role.COORDINATOR]
        number = self._numbers.pop(peer, None)
        if number is not None:
            logger.info("the connection of %s is lost (%s); its requests are aborted", peer, why)
            del self._peers[number]
            loop.inbox.put((number, FrontEndGone(number)))

    def _sort(self, loop: CoreLoop, peer: Peer, frames: list[Frame]) -> None:
        try:
            call = self._calls.decode(frames)
        except TransportError as error:
            self._refuse(loop, peer, frames, error)
            return
        if isinstance(call, WaveOrder) is not (peer.role is Role.COORDINATOR):
            logger.warning("dropped a message of %s: waves, and nothing else, are the coordinator's", peer)
        elif isinstance(call, FrontEndGone):
            self._dismiss(loop, peer, call.index)
        elif peer.role is Role.SUPERVISOR:
            logger.warning("dropped a message of %s: it asks for nothing but to forget front ends", peer)
        else:
            loop.inbox.put((self._numbers.get(peer, peer.index), call))

    def _dismiss(self, loop: CoreLoop, peer: Peer, index: int) -> None:
        """The supervisor says that a front end died."""
        if peer.role is not Role.SUPERVISOR:
            logger.warning("dropped a message of %s: only the supervisor may say who is gone", peer)
            return
        for known in [known for known in self._numbers if known.index == index]:
            self._socket.forget(known)
            self._lose(loop, known, "its process ended")

    def _refuse(self, loop: CoreLoop, peer: Peer, frames: list[Frame], error: TransportError) -> None:
        """A message that cannot be read. Who waits for an answer is told; where it does not even say who that is, the
        connection is given up, and the front end sends again what it needs."""
        logger.warning("dropped a message of %s: %s", peer, error)
        number = self._numbers.get(peer)
        if number is None:
            return
        try:
            names = self._names.decode(frames)
        except TransportError:
            self._socket.forget(peer)
            self._lose(loop, peer, "it sent what cannot be read")
            return
        match names:
            case NamedRequests(requests):
                finish = Finish(FinishReason.ERROR, message="the engine could not read the request")
                failed = [EngineCoreOutput(request_id=request.request_id, finish=finish) for request in requests]
                self.post(number, StepOutputs(EngineCoreOutputs(outputs=failed)))
            case NamedCall(call_id):
                self.post(number, CallResult(call_id, error="ValueError: the engine could not read the call"))

    def _send_posted(self) -> None:
        while True:
            try:
                recipient, report = self._outbox.get_nowait()
            except Empty:
                return
            peer = self._peers.get(recipient)
            if peer is not None:
                with contextlib.suppress(PeerGoneError):  # who watches the socket was told
                    self._socket.send(peer, self._reports.encode(report))


def run(payload: bytes, report: Report) -> None:
    """Entry of the process (utils/processes.py). Ends when told to by SIGTERM, or with an error."""

    def tell(message: ProcessReport) -> None:
        report(_ENCODER.encode(message))

    birth = msgspec.msgpack.decode(payload, type=CoreSpec)
    name_process(f"core {birth.index}")
    everywhere = current_cpus()
    try:
        socket = ServerSocket(birth.address, birth.secret, accepts=(Role.API_SERVER, Role.SUPERVISOR, Role.COORDINATOR))
        with paused():
            executor = make_executor(birth.config, birth.worker, replica=birth.index, replicas=birth.replicas)
            core = EngineCore(birth.config, executor, data_parallel_rank=birth.index)
    except Exception as error:
        logger.debug("the engine core cannot start", exc_info=True)
        tell(Failed(type(error).__name__, str(error)))
        raise SystemExit(1) from error
    mail = MailRoom(socket, everywhere)
    waves = WaveMember(core.has_work, mail.tell_coordinator) if birth.lockstep else None
    # What workers prepare may exchange data between replicas, which then have to do it together.
    loop = CoreLoop(core, mail.post, waves, core.prepare_more if waves is None else None)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    mail.open(loop)
    tell(Started(socket.address, core.ready))
    threading.Thread(target=_pulse, args=(core, loop, tell, everywhere), name="pagemill-pulse", daemon=True).start()
    try:
        loop.run()
    except EngineDeadError:
        logger.exception("the engine core died")
        raise SystemExit(1) from None
    finally:
        mail.close()
        core.shutdown()


def _pulse(core: EngineCore, loop: CoreLoop, tell: Callable[[ProcessReport], None], cpus: frozenset[int]) -> None:
    keep_to(cpus)
    stop = threading.Event()
    while not stop.wait(PULSE_S):
        tell(Pulse(loop.num_steps, loop.idle, loop.stats))
        try:
            core.check_health()
        except PagemillError as error:
            loop.fail(EngineDeadError(str(error)))
            return
