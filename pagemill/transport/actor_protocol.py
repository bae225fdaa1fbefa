"""What an executor and a worker that is a Ray actor say to each other, apart from worker_protocol.py: all bytes.

Knows neither of the two, nor Ray. Ray carries plain `bytes` as they are, so that nothing of ours is pickled.
"""

from collections.abc import Sequence

import msgspec

from pagemill.errors import TransportError
from pagemill.messages.worker_rank import WorkerRank
from pagemill.transport.codec import Frame


class ActorHome(msgspec.Struct, frozen=True):
    """Where an actor runs, as it says itself."""

    node_id: str
    address: str
    """The node's, as the other nodes reach it."""
    pid: int
    version: str
    """Of its pagemill."""
    devices: list[str]
    """The CUDA devices that Ray gave it, as CUDA_VISIBLE_DEVICES names them."""


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor's worker is started with."""

    worker: str
    """"module:callable": called with the configuration and the rank, returns a WorkerApi."""
    config: bytes
    """The EngineConfig as msgpack."""
    rank: WorkerRank
    devices: list[str]
    """The CUDA devices of all the executor's workers on the node, `rank.local_rank` counting among them."""


_JOINED = msgspec.msgpack.Encoder()
_SPLIT = msgspec.msgpack.Decoder(list[memoryview])


def join_frames(frames: Sequence[Frame]) -> bytes:
    """The frames of a message as one piece."""
    return _JOINED.encode(frames)


def split_frames(message: bytes) -> list[memoryview]:
    """The frames again, as views of the message. Raises TransportError when it is none."""
    try:
        return _SPLIT.decode(message)
    except msgspec.DecodeError as error:
        raise TransportError(f"{len(message)} bytes are not the frames of a message: {error}") from error
