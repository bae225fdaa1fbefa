"""`DirectProtocol`: an HTTP connection, on which a response that has begun may also be written to directly.

`send` of an application passes every middleware and waits for the client where it must; a stream that sends a few bytes
for every token pays for that with each. Knows nothing about what is written.
"""

from typing import Protocol

from starlette.types import Scope

from pagemill.serve.http.bounded_protocol import BoundedProtocol

EXTENSION = "pagemill.wire"
"""Where applications find it, among the extensions of a request's scope."""


class Wire(Protocol):
    """The connection under a response."""

    def has_room(self) -> bool:
        """Whether the client is there and reads what is sent."""

    def write_chunk(self, body: bytes) -> None:
        """A part of the body, not empty, of a response that has begun, has more to come and does not say how long it
        is. Never waits."""


class DirectProtocol(BoundedProtocol):
    """Implements `Wire`."""

    def on_message_begin(self) -> None:
        """A request begins: its scope gets the extension."""
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]

    def has_room(self) -> bool:
        return not self.flow.write_paused and not self.transport.is_closing()

    def write_chunk(self, body: bytes) -> None:
        if self._running is None or self._running.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body)
        self.transport.write(body)


def wire_of(scope: Scope) -> Wire | None:
    """The connection that a request came over; None for servers that do not say."""
    wire: Wire | None = scope.get("extensions", {}).get(EXTENSION)
    return wire
