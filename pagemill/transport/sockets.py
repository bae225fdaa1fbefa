"""ZMQ between processes: a server socket that knows its peers, and the socket that connects to one; async_client.py has
that of an event loop.

Knows nothing about messages: what it carries are lists of frames. One connection carries both directions: the server
(an engine core) binds, each client (an API server) connects to every server, and the server answers each peer by
name. Nothing is sent to, or taken from, a process that did not introduce itself (transport/handshake.py).

A connection that is lost is never mended, but noticed at both ends within seconds (transport/liveness.py): at a client,
`receive` and `send` raise PeerGoneError, and whoever owns it connects anew; a server tells who watches it.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from pagemill.errors import (
    ConfigError,
    HandshakeError,
    NoAnswerError,
    NotLetInError,
    PeerGoneError,
)
from pagemill.log import get_logger
from pagemill.transport.addresses import check_private
from pagemill.transport.codec import DEFAULT_LIMITS, Frame, Limits
from pagemill.transport.curve import is_guarded, protect
from pagemill.transport.handshake import (
    LOST,
    Hello,
    Role,
    check_hello,
    check_reply,
    hello_frames,
    is_hello,
    reply_frames,
)
from pagemill.transport.liveness import PULSE_S, SILENT_S, Silence, is_pulse, pulse_frames
from pagemill.transport.zmq_sockets import (
    HIGH_WATER_MARK,
    check_own,
    configure,
    message_in,
    milliseconds,
    new_dealer,
    receive_bounded,
    taken_at,
)
from pagemill.utils.wake_pipe import WakePipe

logger = get_logger(__name__)

MAX_PEERS = 1024


@dataclass(frozen=True)
class Peer:
    """A process that introduced itself."""

    role: Role
    index: int
    routing_id: bytes
    """Its connection: a process that connects again is another Peer."""
    link: str = ""
    """The series of connections that this one belongs to."""
    attempt: int = 0
    """Which of them it is."""

    def __str__(self) -> str:
        return f"{self.role.value} {self.index}"


class ServerSocket:
    """The end that is connected to. One thread calls everything but `wake`; it calls `receive` all the time, which
    gives every peer a pulse and finds those that are lost: closed, silent for `silent_s`, or taking nothing any more.

    Over tcp nobody gets as far as sending a message who does not know `secret` (transport/curve.py). `limits` are by
    default those of NETWORK_LIMITS there, of DEFAULT_LIMITS elsewhere.

    `address` is that of `PrivateDirectory.ipc` or `tcp_address`; the attribute tells the port that was taken.
    `dropped` counts what was not passed on, by reason: stranger, malformed, oversized, refused. Raises ConfigError
    when the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        *,
        accepts: Collection[Role],
        context: "zmq.Context[Any] | None" = None,
        limits: Limits | None = None,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = 1.0,
        silent_s: float = SILENT_S,
    ) -> None:
        check_private(address)
        self.dropped: Counter[str] = Counter()
        self._secret = secret
        self._accepts = frozenset(accepts)
        self._limits = limits = limits or taken_at(address)
        self._silent_s = silent_s
        self._peers: dict[bytes, Peer] = {}
        self._silences: dict[bytes, Silence] = {}
        self._next_pulse = 0.0
        self._joined: Callable[[Peer], None] = _take_no_notice
        self._lost: Callable[[Peer, str], None] = _take_no_notice
        socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        configure(socket, address, limits, high_water_mark)
        protect(socket, address, secret, serves=True)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.SNDTIMEO, int(send_timeout_s * 1000))
        self._socket = socket
        try:
            socket.bind(address)
            self._wakeup = WakePipe()
        except (zmq.ZMQError, OSError) as error:
            socket.close(0)
            raise ConfigError(f"{address} cannot be bound: {error}") from error
        self.address: str = socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fd, zmq.POLLIN)

    @property
    def peers(self) -> list[Peer]:
        """The processes that introduced themselves and were not found gone."""
        return list(self._peers.values())

    def watch(self, *, joined: Callable[[Peer], None], lost: Callable[[Peer, str], None]) -> None:
        """Be told of every peer that introduces itself, and of every one that is lost and why, in the order in which
        messages come and go, by the thread that calls `receive` and `send`. What is lost there, `forget` does not
        tell."""
        self._joined = joined
        self._lost = lost

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """The next message of a peer; None when none came in time, or `wake` was called. Introductions and pulses are
        answered, and the frames of strangers dropped, on the way. Never raises for what a peer sends."""
        deadline = time.monotonic() + timeout_s
        while True:
            if time.monotonic() >= self._next_pulse:
                self._give_pulse()
            with contextlib.suppress(zmq.Again):
                while True:
                    message = self._sort(*receive_bounded(self._socket, self._limits, zmq.NOBLOCK))
                    if message is not None:
                        return message
                    if time.monotonic() > deadline:
                        return None
            now = time.monotonic()
            ready = dict(self._poller.poll(milliseconds(min(deadline, self._next_pulse) - now)))
            if self._wakeup.fd in ready:
                self._wakeup.drain()
                return None
            if not ready and time.monotonic() >= deadline:
                return None

    def send(self, peer: Peer, frames: Sequence[Frame]) -> None:
        """Send to a peer. Large frames are not copied: they must not change any more. Raises PeerGoneError when it
        is gone, or takes nothing for `send_timeout_s`; it is then lost, and what it sends later is dropped."""
        if peer.routing_id not in self._peers:
            raise PeerGoneError(f"{peer} is gone")
        try:
            self._socket.send_multipart([peer.routing_id, *frames], copy=False)
        except zmq.ZMQError as error:
            why = _why_unsent(error)
            self._lose(peer, why)
            raise PeerGoneError(f"{peer}: {why}") from error

    def forget(self, peer: Peer) -> None:
        """Treat a peer as gone: it is told so when it gives its next pulse."""
        self._peers.pop(peer.routing_id, None)
        self._silences.pop(peer.routing_id, None)

    def wake(self) -> None:
        """End the current or next `receive` of the owning thread early. From any thread."""
        self._wakeup.wake()

    def close(self) -> None:
        """Close the socket; what was sent is still delivered for a moment. May be called twice."""
        if not self._socket.closed:
            self._socket.close()
            self._wakeup.close()

    def _sort(self, routing_id: bytes, frames: list[Frame] | None) -> tuple[Peer, list[Frame]] | None:
        """What a message is: that of a peer, or nothing to pass on."""
        peer = self._peers.get(routing_id)
        if peer is not None:
            self._silences[routing_id].end()
        if frames is None:
            self._drop("oversized", peer)
        elif is_hello(frames):
            self._greet(routing_id, frames)
        elif peer is None:
            self._drop("stranger", peer)
            if is_pulse(frames):
                self._reply(routing_id, LOST)
        elif not frames:
            self._drop("malformed", peer)
        elif not is_pulse(frames):
            return peer, frames
        return None

    def _give_pulse(self) -> None:
        """To every peer, and find those that are lost."""
        self._next_pulse = time.monotonic() + PULSE_S
        for peer in self.peers:
            silence = self._silences[peer.routing_id]
            if silence.lasts_too_long():
                self._lose(peer, str(silence))
                continue
            try:
                self._socket.send_multipart([peer.routing_id, *pulse_frames()], flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._lose(peer, _why_unsent(error))

    def _lose(self, peer: Peer, why: str) -> None:
        self.forget(peer)
        self._lost(peer, why)

    def _greet(self, routing_id: bytes, frames: list[Frame]) -> None:
        refusal = None
        try:
            hello = check_hello(frames, self._secret, self._accepts)
            if len(self._peers) >= MAX_PEERS:
                self._make_room()
        except HandshakeError as error:
            refusal = str(error)
            self._count("refused", f"refused a process that connected to {self.address}: {error}")
        else:
            peer = Peer(hello.role, hello.index, routing_id, hello.link, hello.attempt)
            if not self._replace_former(peer):
                self._drop("late", peer)
                return
            self._peers[routing_id] = peer
            self._silences[routing_id] = Silence(self._silent_s)
            self._joined(peer)
        self._reply(routing_id, refusal)

    def _reply(self, routing_id: bytes, error: str | None) -> None:
        with contextlib.suppress(zmq.ZMQError):  # gone again, or not reading
            self._socket.send_multipart([routing_id, *reply_frames(error)], flags=zmq.NOBLOCK)

    def _replace_former(self, peer: Peer) -> bool:
        """Lose the former connection of the same series; False when that is the newer one. The Hellos of attempts that
        were given up may arrive in any order when this process was stopped for a while."""
        for former in self.peers:
            if peer.link and (former.role, former.index, former.link) == (peer.role, peer.index, peer.link):
                if former.attempt > peer.attempt:
                    return False
                self._lose(former, "it connected again")
        return True

    def _make_room(self) -> None:
        """Forget the longest known connection of a process that has connected again since. Raises HandshakeError."""
        latest = {(peer.role, peer.index): peer for peer in self.peers}
        former = next((peer for peer in self.peers if latest[peer.role, peer.index] is not peer), None)
        if former is None:
            raise HandshakeError(f"{MAX_PEERS} processes are connected already")
        self._lose(former, "it connected again")

    def _drop(self, reason: str, peer: Peer | None) -> None:
        self._count(reason, f"dropped a message from {peer or 'a stranger'} at {self.address}: {reason}")

    def _count(self, reason: str, what: str) -> None:
        self.dropped[reason] += 1
        count = self.dropped[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ...: a flood must not fill the log
            logger.warning("%s (%d so far)", what, count)


class ClientSocket:
    """A connection to a `ServerSocket`, for one thread. Pulses are given while it is in `receive`.

    Raises HandshakeError when the server refuses, NoAnswerError when it does not answer in `timeout_s`, NotLetInError
    when it listens, and does not seem to share the secret. A connection that was lost stays so: connect anew.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        timeout_s: float,
        context: "zmq.Context[Any] | None" = None,
        limits: Limits | None = None,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = 5.0,
        silent_s: float = SILENT_S,
    ) -> None:
        check_private(address)
        self.address = address
        self._limits = limits or DEFAULT_LIMITS
        self._taken = limits or taken_at(address)
        self._silence = Silence(silent_s)
        self._next_pulse = 0.0
        self._socket = new_dealer(context or zmq.Context.instance(), address)
        configure(self._socket, address, self._limits, high_water_mark)
        protect(self._socket, address, hello.secret, serves=False)
        self._socket.set(zmq.SNDTIMEO, int(send_timeout_s * 1000))
        try:
            self._socket.connect(address)
            self._socket.send_multipart(hello_frames(hello))
            if not self._socket.poll(milliseconds(timeout_s)):
                raise NoAnswerError(f"{address} did not answer within {timeout_s:g} s")
            check_reply(receive_bounded(self._socket, self._limits, 0, routed=False)[1] or [])
        except (zmq.ZMQError, HandshakeError) as error:
            self._socket.close(0)
            kind = NoAnswerError if isinstance(error, NoAnswerError) else HandshakeError
            if kind is NoAnswerError and is_guarded(address):
                why = "it listens, and does not answer who has this secret: is it the same there?"
                raise NotLetInError(f"no connection to {address}: {why}") from error
            raise kind(f"no connection to {address}: {error}") from error

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """The next message; None when none came in time. Raises PeerGoneError when the connection is lost."""
        deadline = time.monotonic() + timeout_s
        while True:
            if time.monotonic() >= self._next_pulse:
                self._give_pulse()
            wait_s = min(deadline, self._next_pulse) - time.monotonic()
            if self._socket.poll(milliseconds(wait_s)):
                self._silence.end()
                frames = receive_bounded(self._socket, self._limits, 0, routed=False)[1]
                if (message := message_in(frames, self.address)) is not None:
                    return message
            elif time.monotonic() >= deadline:
                return None

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message. Large frames are not copied: they must not change any more. Raises PeerGoneError when the
        server takes nothing for `send_timeout_s`, TransportError when the message is over the limits."""
        check_own(frames, self._taken)
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.Again as error:
            raise PeerGoneError(f"{self.address} takes nothing any more") from error

    def close(self) -> None:
        """Close the connection; what was sent is still delivered for a moment. May be called twice."""
        self._socket.close()

    def _give_pulse(self) -> None:
        self._next_pulse = time.monotonic() + PULSE_S
        if self._silence.lasts_too_long() and not self._socket.poll(0):
            raise PeerGoneError(f"the connection to {self.address} is lost: {self._silence}")
        with contextlib.suppress(zmq.Again):  # much is on its way; if it never gets there, silence tells
            self._socket.send_multipart(pulse_frames(), flags=zmq.NOBLOCK)


def _why_unsent(error: zmq.ZMQError) -> str:
    return "it takes nothing any more" if error.errno == zmq.EAGAIN else "it is gone"


def _take_no_notice(*_: object) -> None:
    """Of peers that come and go."""
