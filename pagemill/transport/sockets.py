"""ZMQ between processes: a server socket that knows its peers, and the sockets that connect to one.

Knows nothing about messages: what it carries are lists of frames. One connection carries both directions: the server
(an engine core) binds, each client (an API server) connects to every server, and the server answers each peer by
name. Nothing is sent to, or taken from, a process that did not introduce itself (transport/handshake.py).
"""

import contextlib
import os
import select
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from pagemill.errors import ConfigError, HandshakeError, NoAnswerError, PeerGoneError, TransportError
from pagemill.log import get_logger
from pagemill.transport.addresses import check_private
from pagemill.transport.codec import DEFAULT_LIMITS, Frame, Limits, check_limits
from pagemill.transport.handshake import Hello, Role, check_hello, check_reply, hello_frames, is_hello, reply_frames

logger = get_logger(__name__)

HIGH_WATER_MARK = 10_000
"""Messages that may wait in each direction, per peer."""
LINGER_MS = 500
"""How long a closed socket tries to deliver what was sent."""
MAX_PEERS = 1024
HEARTBEAT_MS = 5_000
"""Between machines: a peer that does not answer six of them is gone."""


@dataclass(frozen=True)
class Peer:
    """A process that introduced itself."""

    role: Role
    index: int
    routing_id: bytes
    """Its connection: a process that connects again is another Peer."""

    def __str__(self) -> str:
        return f"{self.role.value} {self.index}"


class ServerSocket:
    """The end that is connected to. One thread calls everything but `wake`.

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
        limits: Limits = DEFAULT_LIMITS,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = 1.0,
    ) -> None:
        check_private(address)
        self.dropped: Counter[str] = Counter()
        self._secret = secret
        self._accepts = frozenset(accepts)
        self._limits = limits
        self._peers: dict[bytes, Peer] = {}
        socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        _configure(socket, address, limits, high_water_mark)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.SNDTIMEO, int(send_timeout_s * 1000))
        self._socket = socket
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(f"{address} cannot be bound: {error}") from error
        self.address: str = socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    @property
    def peers(self) -> list[Peer]:
        """The processes that introduced themselves and were not found gone."""
        return list(self._peers.values())

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """The next message of a peer; None when none came in time, or `wake` was called. Introductions are answered,
        and the frames of strangers dropped, on the way. Never raises for what a peer sends."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(zmq.Again):
                while True:
                    message = self._sort(*_receive_bounded(self._socket, self._limits, zmq.NOBLOCK))
                    if message is not None:
                        return message
                    if time.monotonic() > deadline:
                        return None
            remaining = deadline - time.monotonic()
            ready = dict(self._poller.poll(int(max(0.0, remaining) * 1000)))
            if self._wake_read in ready:
                _drain_pipe(self._wake_read)
                return None
            if not ready:
                return None

    def send(self, peer: Peer, frames: Sequence[Frame]) -> None:
        """Send to a peer. Large frames are not copied: they must not change any more. Raises PeerGoneError when it
        is gone, or takes nothing for `send_timeout_s`; it is then forgotten, and what it sends later is dropped."""
        try:
            if peer.routing_id not in self._peers:
                raise PeerGoneError(f"{peer} is gone")
            self._socket.send_multipart([peer.routing_id, *frames], copy=False)
        except zmq.ZMQError as error:
            self._peers.pop(peer.routing_id, None)
            why = "takes nothing any more" if error.errno == zmq.EAGAIN else "is gone"
            raise PeerGoneError(f"{peer} {why}") from error

    def forget(self, peer: Peer) -> None:
        """Treat a peer as gone."""
        self._peers.pop(peer.routing_id, None)

    def wake(self) -> None:
        """End the current or next `receive` of the owning thread early. From any thread."""
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are waiting
            os.write(self._wake_write, b"w")

    def close(self) -> None:
        """Close the socket; what was sent is still delivered for a moment. May be called twice."""
        if not self._socket.closed:
            self._socket.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _sort(self, routing_id: bytes, frames: list[Frame] | None) -> tuple[Peer, list[Frame]] | None:
        """What a message is: that of a peer, or nothing to pass on."""
        peer = self._peers.get(routing_id)
        if frames is None:
            self._drop("oversized", peer)
        elif is_hello(frames):
            self._greet(routing_id, frames)
        elif peer is None:
            self._drop("stranger", peer)
        elif not frames:
            self._drop("malformed", peer)
        else:
            return peer, frames
        return None

    def _greet(self, routing_id: bytes, frames: list[Frame]) -> None:
        refusal = None
        try:
            hello = check_hello(frames, self._secret, self._accepts)
            if len(self._peers) >= MAX_PEERS:
                self._make_room()
        except HandshakeError as error:
            refusal = str(error)
            self.dropped["refused"] += 1
            logger.warning("refused a process that connected to %s: %s", self.address, error)
        else:
            self._peers[routing_id] = Peer(hello.role, hello.index, routing_id)
        with contextlib.suppress(zmq.ZMQError):  # gone again, or not reading
            self._socket.send_multipart([routing_id, *reply_frames(refusal)], flags=zmq.NOBLOCK)

    def _make_room(self) -> None:
        """Forget the longest known connection of a process that has connected again since. Raises HandshakeError."""
        latest = {(peer.role, peer.index): peer for peer in self.peers}
        former = next((peer for peer in self.peers if latest[peer.role, peer.index] is not peer), None)
        if former is None:
            raise HandshakeError(f"{MAX_PEERS} processes are connected already")
        self.forget(former)

    def _drop(self, reason: str, peer: Peer | None) -> None:
        self.dropped[reason] += 1
        count = self.dropped[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ...: a flood must not fill the log
            sender = peer or "a stranger"
            logger.warning("dropped a message from %s at %s: %s (%d so far)", sender, self.address, reason, count)


class ClientSocket:
    """A connection to a `ServerSocket`, for one thread.

    Raises HandshakeError when the server refuses, NoAnswerError when it does not answer in `timeout_s`. A server that
    is started again is another server: connect anew, this connection stays dead.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        timeout_s: float,
        context: "zmq.Context[Any] | None" = None,
        limits: Limits = DEFAULT_LIMITS,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = 5.0,
    ) -> None:
        check_private(address)
        self.address = address
        self.dropped: Counter[str] = Counter()
        self._limits = limits
        self._socket = (context or zmq.Context.instance()).socket(zmq.DEALER)
        _configure(self._socket, address, limits, high_water_mark)
        self._socket.set(zmq.SNDTIMEO, int(send_timeout_s * 1000))
        try:
            self._socket.connect(address)
            self._socket.send_multipart(hello_frames(hello))
            reply = self.receive(timeout_s)
            if reply is None:
                raise NoAnswerError(f"{address} did not answer within {timeout_s:g} s")
            check_reply(reply)
        except (zmq.ZMQError, HandshakeError) as error:
            self._socket.close(0)
            kind = NoAnswerError if isinstance(error, NoAnswerError) else HandshakeError
            raise kind(f"no connection to {address}: {error}") from error

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """The next message; None when none came in time."""
        deadline = time.monotonic() + timeout_s
        while self._socket.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
            frames = _receive_bounded(self._socket, self._limits, 0, routed=False)[1]
            if frames is not None:
                return frames
            self.dropped["oversized"] += 1
        return None

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message. Large frames are not copied: they must not change any more. Raises PeerGoneError when the
        server takes nothing for `send_timeout_s`."""
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.Again as error:
            raise PeerGoneError(f"{self.address} takes nothing any more") from error

    def close(self) -> None:
        """Close the connection; what was sent is still delivered for a moment. May be called twice."""
        self._socket.close()


class AsyncClientSocket:
    """`ClientSocket` for one event loop: `await AsyncClientSocket.connect(...)`, the arguments are the same."""

    def __init__(self, socket: zmq.asyncio.Socket, address: str, limits: Limits) -> None:
        self.address = address
        self.dropped: Counter[str] = Counter()
        self._limits = limits
        self._socket = socket

    @classmethod
    async def connect(
        cls,
        address: str,
        hello: Hello,
        *,
        timeout_s: float,
        context: "zmq.asyncio.Context | None" = None,
        limits: Limits = DEFAULT_LIMITS,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = 5.0,
    ) -> "AsyncClientSocket":
        """Connect and introduce this process. Raises HandshakeError."""
        check_private(address)
        socket = (context or zmq.asyncio.Context.instance()).socket(zmq.DEALER)
        _configure(socket, address, limits, high_water_mark)
        socket.set(zmq.SNDTIMEO, int(send_timeout_s * 1000))
        client = cls(socket, address, limits)
        try:
            socket.connect(address)
            await socket.send_multipart(hello_frames(hello))
            if not await socket.poll(int(timeout_s * 1000)):
                raise HandshakeError(f"{address} did not answer within {timeout_s:g} s")
            check_reply(await client.receive())
        except (zmq.ZMQError, HandshakeError, PeerGoneError) as error:
            socket.close(0)
            raise HandshakeError(f"no connection to {address}: {error}") from error
        except BaseException:  # cancelled: nobody else will close it
            socket.close(0)
            raise
        return client

    async def receive(self) -> list[Frame]:
        """The next message; waits for it. Raises PeerGoneError when the connection is closed."""
        while True:
            try:
                frames: list[Frame] = [_buffer(frame) for frame in await self._socket.recv_multipart(copy=False)]
            except zmq.ZMQError as error:
                raise PeerGoneError(f"the connection to {self.address} is closed: {error}") from error
            with contextlib.suppress(TransportError):
                check_limits([memoryview(frame).nbytes for frame in frames], self._limits)
                return frames
            self.dropped["oversized"] += 1

    async def send(self, frames: Sequence[Frame]) -> None:
        """Send a message. Large frames are not copied: they must not change any more. Raises PeerGoneError when the
        server takes nothing for `send_timeout_s`."""
        try:
            await self._socket.send_multipart(frames, copy=False)
        except zmq.Again as error:
            raise PeerGoneError(f"{self.address} takes nothing any more") from error
        except zmq.ZMQError as error:  # it was closed meanwhile
            raise PeerGoneError(f"the connection to {self.address} is closed: {error}") from error

    def close(self) -> None:
        """Close the connection; what was sent is still delivered for a moment. May be called twice."""
        self._socket.close()


def _configure(socket: "zmq.Socket[Any]", address: str, limits: Limits, high_water_mark: int) -> None:
    socket.set(zmq.SNDHWM, high_water_mark)
    socket.set(zmq.RCVHWM, high_water_mark)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.MAXMSGSIZE, limits.max_frame_bytes)
    if address.startswith("tcp://"):
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 6 * HEARTBEAT_MS)
        socket.set(zmq.IPV6, 1 if "[" in address else 0)


def _receive_bounded(
    socket: "zmq.Socket[Any]", limits: Limits, flags: int, *, routed: bool = True
) -> tuple[bytes, list[Frame] | None]:
    """(routing id, frames) of the next message; frames is None when it is over the limits, whose parts are not kept.
    Raises zmq.Again when there is none."""
    routing_id = b""
    frames: list[Frame] | None = []
    total = 0
    frame = socket.recv(flags, copy=False)
    if routed:
        routing_id = frame.bytes
    else:
        frames, total = [_buffer(frame)], len(frame)
    while frame.more:
        frame = socket.recv(copy=False)  # the parts of a message arrive together
        total += len(frame)
        if frames is not None and len(frames) < limits.max_frames and total <= limits.max_message_bytes:
            frames.append(_buffer(frame))
        else:
            frames = None
    return routing_id, frames


def _buffer(frame: "zmq.Frame") -> memoryview:
    return memoryview(frame.buffer)


def _drain_pipe(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while len(os.read(fd, select.PIPE_BUF)) == select.PIPE_BUF:
            pass
