"""What both ends of a connection do with a ZMQ socket: settings, and messages within limits.

Knows neither peers nor introductions.
"""

from collections.abc import Sequence
from typing import Any

import zmq

from pagemill.errors import HandshakeError, NoAnswerError, PeerGoneError
from pagemill.transport.codec import DEFAULT_LIMITS, NETWORK_LIMITS, Frame, Limits, check_limits
from pagemill.transport.handshake import check_reply, is_hello
from pagemill.transport.liveness import is_pulse

HIGH_WATER_MARK = 10_000
"""Messages that may wait in each direction, per peer."""
LINGER_MS = 500
"""How long a closed socket tries to deliver what was sent."""
HEARTBEAT_MS = 5_000
"""Between machines: a peer that does not answer six of them is gone."""


def new_dealer(context: "zmq.Context[Any]", address: str) -> Any:
    """A socket of this context. Raises NoAnswerError while there are no descriptors left: that may pass."""
    try:
        return context.socket(zmq.DEALER)
    except zmq.ZMQError as error:
        raise NoAnswerError(f"no connection to {address}: {error}") from error


def configure(socket: "zmq.Socket[Any]", address: str, limits: Limits, high_water_mark: int) -> None:
    socket.set(zmq.SNDHWM, high_water_mark)
    socket.set(zmq.RCVHWM, high_water_mark)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.MAXMSGSIZE, limits.max_frame_bytes)
    if address.startswith("tcp://"):
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 6 * HEARTBEAT_MS)
        socket.set(zmq.IPV6, 1 if "[" in address else 0)


def receive_bounded(
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
        frames = [_buffer(frame)]
        total = len(frame)
    while frame.more:
        frame = socket.recv(copy=False)  # the parts of a message arrive together
        total += len(frame)
        if frames is not None and len(frames) < limits.max_frames and total <= limits.max_message_bytes:
            frames.append(_buffer(frame))
        else:
            frames = None
    return routing_id, frames


def message_in(frames: list[Frame] | None, address: str) -> list[Frame] | None:
    """What a server sent, if it is not about the connection itself. Raises PeerGoneError when that is lost: the server
    does not know it any more, or a message is over the limits, for none may be missing."""
    if frames is None:
        raise PeerGoneError(f"the connection to {address} is given up: a message is over the limits")
    if is_pulse(frames):
        return None
    if not is_hello(frames):
        return frames
    try:
        check_reply(frames)
    except HandshakeError as error:
        raise PeerGoneError(f"the connection to {address} is lost: {error}") from error
    return None


def taken_at(address: str) -> Limits:
    """What a server takes, if nothing else is said."""
    return NETWORK_LIMITS if address.startswith("tcp://") else DEFAULT_LIMITS


def check_own(frames: Sequence[Frame], limits: Limits) -> None:
    """Raise TransportError for a message that the other end would drop."""
    check_limits([memoryview(frame).nbytes for frame in frames], limits)


def milliseconds(seconds: float) -> int:
    """For poll: at least 1 of what is left, or waiting would turn into spinning."""
    return max(1, int(seconds * 1000)) if seconds > 0 else 0


def _buffer(frame: "zmq.Frame") -> memoryview:
    return memoryview(frame.buffer)
