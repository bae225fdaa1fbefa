"""Whether the other end of a connection still answers: pulses, and how much silence is borne.

Knows nothing about sockets. Both ends of a connection send a pulse every `PULSE_S` seconds, whatever else they send. An
end that hears nothing for `SILENT_S` treats the connection as lost. A server that gets a pulse from a connection it
does not know (the library that carries messages connects again by itself, under another name, after a reset) answers
that it must introduce itself; the client then gives up the connection and makes another.
"""

import secrets

import msgspec

from pagemill.transport.codec import Frame
from pagemill.transport.handshake import Hello

PULSE_S = 1.0
SILENT_S = 10.0
_PULSE = b"pagemill-pulse"


def pulse_frames() -> list[Frame]:
    """The frames of a pulse."""
    return [_PULSE]


def is_pulse(frames: list[Frame]) -> bool:
    """Whether these frames are a pulse. No message begins so: the first byte of a msgpack map or array is another."""
    return len(frames) == 1 and len(frames[0]) == len(_PULSE) and bytes(frames[0]) == _PULSE


class Silence:
    """How long nothing was heard from the other end, counted in pulses of this end's own.

    A process that was itself stopped for a minute has missed nothing but one pulse: it first reads what has arrived.
    """

    __slots__ = ("_limit", "_num_pulses", "_silent_s")

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._limit = max(1, round(silent_s / PULSE_S))
        self._num_pulses = 0

    def end(self) -> None:
        """Something came from the other end: it is silent no more."""
        self._num_pulses = 0

    def lasts_too_long(self) -> bool:
        """Count one pulse of one's own; whether nothing was heard for `silent_s`."""
        self._num_pulses += 1
        return self._num_pulses > self._limit

    def __str__(self) -> str:
        return f"nothing was heard for {self._silent_s:g} s"


class Introductions:
    """The Hellos of successive connections that replace each other. The server forgets the former when the next
    introduces itself, and takes no notice of one that arrives late."""

    def __init__(self, hello: Hello) -> None:
        self._hello = msgspec.structs.replace(hello, link=secrets.token_hex(8), attempt=0)

    def next(self) -> Hello:
        """For the next connection."""
        self._hello = msgspec.structs.replace(self._hello, attempt=self._hello.attempt + 1)
        return self._hello
