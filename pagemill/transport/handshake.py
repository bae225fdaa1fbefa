"""What a process says when it connects: protocol version, shared secret, role and index; and the answer.

Knows nothing about sockets. The secret reaches children through a pipe, never through a command line. Over tcp
it travels encrypted (curve.py).
"""

import hmac
import secrets
from collections.abc import Collection, Sequence
from enum import Enum
from typing import TypeVar

import msgspec

from pagemill.errors import HandshakeError
from pagemill.transport.codec import Frame

M = TypeVar("M")
PROTOCOL_VERSION = 2
MAGIC = b"pagemill-hello"
MAX_HELLO_BYTES = 4096
MAX_INDEX = 1 << 16
LOST = "the connection was lost; introduce yourself again"
"""What a server answers to the pulse of a connection that it does not know."""


class Role(Enum):
    """What a process is, in the words of its title."""

    API_SERVER = "api server"
    WORKER = "worker"
    COORDINATOR = "dp coordinator"
    SUPERVISOR = "supervisor"
    NODE = "node"


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a connecting process. Named fields, so that other versions can still read `version`."""

    version: int = PROTOCOL_VERSION
    secret: str
    role: Role
    index: int
    """Which of the processes of this role."""
    link: str = ""
    """Names a series of connections of which each replaces the one before; empty: this one replaces none."""
    attempt: int = 0
    """Which connection of the series."""


class HelloReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a Hello; `error` is None when the peer is accepted."""

    version: int = PROTOCOL_VERSION
    error: str | None = None


class _AnyVersion(msgspec.Struct, frozen=True):
    version: int


def new_secret() -> str:
    """A secret for one deployment: 256 random bits in hexadecimal."""
    return secrets.token_hex(32)


def hello_frames(hello: Hello) -> list[Frame]:
    """The frames that introduce a process."""
    return [MAGIC, msgspec.msgpack.encode(hello)]


def is_hello(frames: Sequence[Frame]) -> bool:
    """Whether these frames claim to be a Hello or its reply."""
    return len(frames) == 2 and len(frames[0]) == len(MAGIC) and bytes(frames[0]) == MAGIC


def check_hello(frames: Sequence[Frame], secret: str, accepts: Collection[Role]) -> Hello:
    """The Hello in these frames, if it may come in. Raises HandshakeError, whose text the peer may be told."""
    hello = _decode(frames, Hello)
    if not hmac.compare_digest(hello.secret.encode(), secret.encode()):
        raise HandshakeError("the shared secret is wrong: the two processes do not belong to one deployment")
    if hello.role not in accepts:
        allowed = ", ".join(sorted(role.value for role in accepts))
        raise HandshakeError(f"a process of role {hello.role.value!r} is not accepted here; allowed: {allowed}")
    if not 0 <= hello.index <= MAX_INDEX:
        raise HandshakeError(f"index {hello.index} is not allowed: 0 to {MAX_INDEX}")
    return hello


def reply_frames(error: str | None = None) -> list[Frame]:
    """The answer to a Hello: accepted, or refused with a reason."""
    return [MAGIC, msgspec.msgpack.encode(HelloReply(error=error))]


def check_reply(frames: Sequence[Frame]) -> None:
    """Raise HandshakeError when these frames are not the answer of a process that accepts us."""
    reply = _decode(frames, HelloReply)
    if reply.error is not None:
        raise HandshakeError(f"refused: {reply.error}")


def _decode(frames: Sequence[Frame], kind: type[M]) -> M:
    if not is_hello(frames) or len(frames[1]) > MAX_HELLO_BYTES:
        raise HandshakeError("a peer did not introduce itself as a process of pagemill")
    version = _read(frames[1], _AnyVersion).version
    if version != PROTOCOL_VERSION:
        raise HandshakeError(f"the peer speaks protocol version {version}, this process {PROTOCOL_VERSION}")
    return _read(frames[1], kind)


def _read(body: Frame, kind: type[M]) -> M:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise HandshakeError("the peer's introduction cannot be read") from error
