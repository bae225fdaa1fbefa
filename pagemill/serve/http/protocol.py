"""`DirectProtocol`: an HTTP connection, on which a response that has begun may also be written to directly.

`send` of an application passes every middleware and waits for the client where it must; a stream that sends a few bytes
for every token pays for that with each. The head of a response goes out with the beginning of its body, as one write.
Knows nothing about what is written.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pagemill.serve.http.bounded_protocol import BoundedProtocol

EXTENSION = "pagemill.wire"
"""Where applications find it, among the extensions of a request's scope."""
MAX_JOINED_BYTES = 64 << 10
"""Of a body's beginning: with more, what joining costs is more than what a write does."""


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

    def on_response_complete(self) -> None:
        """Its head may be all of a response."""
        if self._running is not None:
            self._running.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.transport = _HeadWithBody(cycle.transport)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def has_room(self) -> bool:
        return not self.flow.write_paused and not self.transport.is_closing()

    def write_chunk(self, body: bytes) -> None:
        if self._running is None or self._running.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body)
        self.transport.write(body)


class _HeadWithBody:
    """What one response writes to: a transport, which gets the first write, the head, with the next."""

    __slots__ = ("_head", "_transport", "write")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self.write: Callable[[bytes], None] = self._keep

    def _keep(self, head: bytes) -> None:
        self._head = head
        self.write = self._write_first

    def _write_first(self, data: bytes) -> None:
        head = self._head
        self._head = b""
        self.write = self._transport.write
        if len(data) > MAX_JOINED_BYTES:
            self._transport.write(head)
            self._transport.write(data)
        else:
            self._transport.write(head + data)

    def flush(self) -> None:
        """Write the head of a response that has no body."""
        if self._head:
            self._write_first(b"")

    def close(self) -> None:
        """Close the connection, once all is written."""
        self.flush()
        self._transport.close()


def wire_of(scope: Scope) -> Wire | None:
    """The connection that a request came over; None for servers that do not say."""
    wire: Wire | None = scope.get("extensions", {}).get(EXTENSION)
    return wire
