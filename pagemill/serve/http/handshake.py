"""`Handshake`: a connection that came in and has not agreed on its encryption yet. It counts as a connection from its
first moment, and gives way like one that has sent no request; then an HTTP connection takes its place.

asyncio tells a protocol of its connection after the handshake only: whoever begins many and finishes none would be seen
by nobody.
"""

import asyncio
import functools
import ssl
from collections.abc import Callable
from typing import Any

from pagemill.log import get_logger
from pagemill.serve.http.connections import Connections

logger = get_logger(__name__)


class Handshake(asyncio.Protocol):
    """Implements `Connection`. The socket's connection belongs to it until the handshake begins, and the encrypted one
    until the HTTP connection is made: the first request may come with the end of the handshake."""

    def __init__(
        self,
        *,
        make: Callable[..., asyncio.Protocol],
        context: ssl.SSLContext,
        connections: Connections,
        server_state: Any,
        **others: Any,
    ) -> None:
        """`make` makes the HTTP connection, from `server_state` and `others`. `connections`: all of the server."""
        self._make = functools.partial(make, connections=connections, server_state=server_state, **others)
        self._context = context
        self._all = connections
        self._at_work: set[Any] = server_state.connections
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        self._is_lost = False

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a connection that has no two directions")
        self._transport = transport
        transport.pause_reading()  # what comes is not for this protocol
        self._at_work.add(self)
        self._all.add(self)
        if not transport.is_closing():
            self._task = asyncio.get_running_loop().create_task(self._run(transport))

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._forget()

    # What the server calls

    def shutdown(self) -> None:
        """End the connection, as the server shuts down."""
        self.give_way()

    # Connection

    def give_way(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def refuse_for_load(self) -> None:
        """Without a word: nothing can be said before the handshake."""
        self.give_way()

    def check(self, now: float) -> None:
        """The handshake has a time limit of its own."""

    async def _run(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        limit_s = self._all.limits.head_s
        try:
            encrypted = await loop.start_tls(
                transport, self, self._context, server_side=True, ssl_handshake_timeout=limit_s
            )
        except OSError as error:  # an error of TLS is one, and so is the end of the time
            logger.debug("a handshake failed: %s", error)
            transport.abort()
            return
        finally:
            self._forget()
        if encrypted is None or self._is_lost:
            return
        protocol = self._make()
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        for data in self._early:
            protocol.data_received(data)

    def _forget(self) -> None:
        self._at_work.discard(self)
        self._all.remove(self)
