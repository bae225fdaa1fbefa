"""`AsyncClientSocket`: a connection to a `ServerSocket` (sockets.py), for one event loop."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import zmq

from pagemill.errors import HandshakeError, NoAnswerError, PeerGoneError
from pagemill.transport.addresses import check_private
from pagemill.transport.codec import DEFAULT_LIMITS, Frame, Limits
from pagemill.transport.curve import protect
from pagemill.transport.handshake import Hello, check_reply, hello_frames
from pagemill.transport.liveness import PULSE_S, SILENT_S, Silence, pulse_frames
from pagemill.transport.zmq_sockets import (
    HIGH_WATER_MARK,
    LINGER_MS,
    check_own,
    configure,
    message_in,
    new_dealer,
    receive_bounded,
    taken_at,
)

_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)  # as numbers: an operation with a flag makes a flag, slowly


class AsyncClientSocket:
    """`ClientSocket` for one event loop: `await AsyncClientSocket.connect(...)`, the arguments are the same. Pulses are
    given by a task of its own.

    The event loop watches the descriptor of the socket, which tells of a change once. That costs a third of what
    zmq.asyncio does, which makes futures for every message.
    """

    def __init__(
        self,
        socket: "zmq.Socket[Any]",
        address: str,
        limits: Limits,
        taken: Limits,
        send_timeout_s: float,
        silent_s: float,
    ) -> None:
        """Of a connected socket. `limits` are those of what comes, `taken` those of what the server takes."""
        self.address = address
        self.problem: str | None = None
        """Why the connection is lost; None while it is not."""
        self._limits = limits
        self._taken = taken
        self._send_timeout_s = send_timeout_s
        self._silence = Silence(silent_s)
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.get(zmq.FD))
        self._receiver: asyncio.Future[None] | None = None
        """Who waits for a message."""
        self._senders: set[asyncio.Future[None]] = set()
        """Who waits for room."""
        self._pulse: asyncio.Task[None] | None = None
        self._loop.add_reader(self._fd, self._look)

    @classmethod
    async def connect(
        cls,
        address: str,
        hello: Hello,
        *,
        timeout_s: float,
        context: "zmq.Context[Any] | None" = None,
        limits: Limits | None = None,
        high_water_mark: int = HIGH_WATER_MARK,
        send_timeout_s: float = 5.0,
        silent_s: float = SILENT_S,
    ) -> "AsyncClientSocket":
        """Connect and introduce this process. Raises HandshakeError."""
        check_private(address)
        accepted = limits or DEFAULT_LIMITS
        socket = new_dealer(context or zmq.Context.instance(), address)
        configure(socket, address, accepted, high_water_mark)
        protect(socket, address, hello.secret, serves=False)
        client = cls(socket, address, accepted, limits or taken_at(address), send_timeout_s, silent_s)
        try:
            socket.connect(address)
            await client._send(hello_frames(hello))
            async with asyncio.timeout(timeout_s):
                check_reply(await client._receive() or [])
        except (zmq.ZMQError, HandshakeError, TimeoutError) as error:
            client.close(linger_ms=0)
            if isinstance(error, TimeoutError):
                error = NoAnswerError(f"{address} did not answer within {timeout_s:g} s")
            kind = NoAnswerError if isinstance(error, NoAnswerError) else HandshakeError
            raise kind(f"no connection to {address}: {error}") from error
        except BaseException:  # cancelled: nobody else will close it
            client.close(linger_ms=0)
            raise
        client._pulse = client._loop.create_task(client._give_pulses(), name=f"pulse-{address}")
        return client

    async def receive(self) -> list[Frame]:
        """The next message; waits for it, and for nothing when it is there. Raises PeerGoneError when the connection is
        lost or closed. One task at a time."""
        while True:
            try:
                frames = await self._receive()
            except zmq.ZMQError as error:
                raise PeerGoneError(f"the connection to {self.address} is closed: {error}") from error
            self._silence.end()
            try:
                message = message_in(frames, self.address)
            except PeerGoneError as error:
                self._lose(str(error))
                raise
            if message is not None:
                return message

    async def send(self, frames: Sequence[Frame]) -> None:
        """Send a message. Large frames are not copied: they must not change any more. Raises PeerGoneError when the
        connection is lost or closed, or the server takes nothing for `send_timeout_s`: then it is lost, too; and
        TransportError when the message is over the limits."""
        self._check_kept()
        check_own(frames, self._taken)
        try:
            await self._send(frames)
        except TimeoutError as error:
            problem = f"{self.address} takes nothing any more"
            self._lose(problem)
            raise PeerGoneError(problem) from error
        except zmq.ZMQError as error:  # it was closed meanwhile
            raise PeerGoneError(f"the connection to {self.address} is closed: {error}") from error

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close the connection; what was sent is still delivered for a moment. May be called twice."""
        self._lose(f"the connection to {self.address} is closed")
        if self._pulse is not None:
            self._pulse.cancel()
        if self._socket.closed:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._socket.close(linger_ms)

    async def _receive(self) -> list[Frame] | None:
        """The frames of the next message; None for one over the limits. Raises PeerGoneError when the connection is
        lost, zmq.ZMQError when the socket is closed."""
        while True:
            self._check_kept()
            if self._look() & _IN:  # to try where nothing is there costs an exception
                with contextlib.suppress(zmq.Again):
                    return receive_bounded(self._socket, self._limits, zmq.NOBLOCK, routed=False)[1]
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None

    async def _send(self, frames: Sequence[Frame]) -> None:
        """Raises TimeoutError when there is no room for a message within `send_timeout_s`, otherwise as `_receive`."""
        try:
            self._send_now(frames)
        except zmq.Again:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send_later(frames)

    async def _send_later(self, frames: Sequence[Frame]) -> None:
        while True:
            sender = self._loop.create_future()
            self._senders.add(sender)
            try:
                self._look()
                await sender
            finally:
                self._senders.discard(sender)
            self._check_kept()
            with contextlib.suppress(zmq.Again):  # another was faster
                self._send_now(frames)
                return

    def _send_now(self, frames: Sequence[Frame]) -> None:
        """Raises zmq.Again when there is no room."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        finally:
            self._look()  # sending has noticed what came meanwhile, so that the descriptor does not tell of it any more

    def _look(self) -> int:
        """What the socket is ready for, as bits; whoever waits for that goes on. The descriptor is quiet then: nothing
        else may ask the socket."""
        if self._socket.closed:
            return 0
        events = int(self._socket.get(zmq.EVENTS))
        if events & _IN and self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)
        if events & _OUT and self._senders:
            for sender in self._senders:
                if not sender.done():
                    sender.set_result(None)
        return events

    async def _give_pulses(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it was closed
            while True:
                with contextlib.suppress(zmq.Again):  # much is on its way; if it never gets there, silence tells
                    self._send_now(pulse_frames())
                await asyncio.sleep(PULSE_S)
                if self._silence.lasts_too_long() and not self._look() & _IN:
                    self._lose(f"the connection to {self.address} is lost: {self._silence}")
                    return

    def _check_kept(self) -> None:
        """Raises PeerGoneError when the connection is lost."""
        if self.problem is not None:
            raise PeerGoneError(self.problem)

    def _lose(self, problem: str) -> None:
        """From now on, `receive` and `send` raise PeerGoneError; so do those that wait."""
        self.problem = self.problem or problem
        for waiter in (self._receiver, *self._senders):
            if waiter is not None and not waiter.done():
                waiter.set_exception(PeerGoneError(self.problem))
