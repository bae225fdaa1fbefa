"""`SubscriberRelay`: listens in place of a socket whose peers are strangers, and bounds how much they say.

The library takes in whatever a peer sends before anybody is asked: topics, for each byte of which it keeps fifty, and
messages without an end. A subscriber says little (a greeting, some topics, now and then a request or a sign of life),
so that it can be counted in bytes, without knowing what they mean. What subscribers are sent is passed on as it is.
"""

import asyncio
import contextlib
import socket
import threading
import time
from typing import Final

from pagemill.log import get_logger

logger = get_logger(__name__)

MAX_SUBSCRIBERS: Final = 128
MAX_BURST_BYTES: Final = 16 << 10
"""What one may say at once..."""
SUBSCRIBER_BYTES_PER_S: Final = 1024
"""... and after that, on average."""
BUFFER_BYTES: Final = 256 << 10
"""Of what is under way to one of them; who does not read holds up nobody but himself."""
BACKLOG: Final = 128
_TURNS_TO_ACCEPT: Final = 4
"""Of the loop: in one a task begins to make a connection, in the next the connection begins, in the third we hear."""


class SubscriberRelay:
    """Accepts on `host` and `port` and connects each peer to the unix socket at `inner`, on a thread of its own.

    Raises OSError when the port cannot be had."""

    def __init__(self, host: str, port: int, inner: str) -> None:
        self.inner = inner
        """Path of the socket that peers are connected to from now on."""
        self._num_refused = 0
        self._peers: set[asyncio.Task[None]] = set()
        every = host == "::"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=every)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: logger.debug("%s", context.get("message")))
        self._closing = asyncio.Event()
        self._linger_s = 0.0
        self._thread = threading.Thread(target=self._run, name="pagemill-subscribers", daemon=True)
        self._thread.start()

    def close(self, linger_s: float = 0.0) -> None:
        """Free the port. The inner socket should be closed before: what it sent is passed on for so long. May be called
        twice."""
        if self._thread.is_alive():
            self._linger_s = linger_s
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accepted, sock=self._listener, limit=MAX_BURST_BYTES // 4)
        await self._closing.wait()
        # Whom asyncio has accepted has to become a connection before the server is closed, which forgets those that are
        # not: nobody would close them. A task that is cancelled before it begins closes nothing either.
        self._loop.remove_reader(self._listener)
        for _ in range(_TURNS_TO_ACCEPT):
            await asyncio.sleep(0)
        server.close()
        peers = set(self._peers)
        if peers:
            _, late = await asyncio.wait(peers, timeout=self._linger_s)
            for peer in late:
                peer.cancel()
            await asyncio.gather(*peers, return_exceptions=True)
        await asyncio.sleep(0)  # the last of them is closed

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing.is_set():
            writer.transport.abort()
            return
        if len(self._peers) >= MAX_SUBSCRIBERS:
            self._refuse(f"{len(self._peers)} are connected already", writer)
            return
        peer = self._loop.create_task(self._relay(reader, writer))
        self._peers.add(peer)
        peer.add_done_callback(self._peers.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on both ways, until one end is closed, or the peer says too much."""
        ends = [writer]
        try:
            with contextlib.suppress(OSError):
                from_inner, to_inner = await asyncio.open_unix_connection(self.inner, limit=BUFFER_BYTES // 4)
                ends.append(to_inner)
                incoming = self._loop.create_task(self._pass_on_bounded(reader, to_inner, writer))
                outgoing = self._loop.create_task(_pass_on(from_inner, writer))
                try:
                    await asyncio.wait((incoming, outgoing), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (incoming, outgoing):
                        task.cancel()
                    await asyncio.gather(incoming, outgoing, return_exceptions=True)
                for end in ends:
                    end.close()
                for end in ends:
                    await end.wait_closed()  # what is still under way is passed on
        finally:
            for end in ends:
                end.transport.abort()

    async def _pass_on_bounded(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: asyncio.StreamWriter
    ) -> None:
        left = float(MAX_BURST_BYTES)
        at = time.monotonic()
        while received := await reader.read(MAX_BURST_BYTES // 4):
            now = time.monotonic()
            left = min(MAX_BURST_BYTES, left + (now - at) * SUBSCRIBER_BYTES_PER_S) - len(received)
            at = now
            if left < 0:
                self._refuse("it sent more than a subscriber has to send", peer)
                return
            writer.write(received)
            await writer.drain()

    def _refuse(self, why: str, writer: asyncio.StreamWriter) -> None:
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # the 1st, 2nd, 4th, ...: nobody may fill the log
            logger.warning("hung up on a subscriber to KV cache events: %s (%d so far)", why, self._num_refused)
        writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
    while received := await reader.read(BUFFER_BYTES // 4):
        writer.write(received)
        await writer.drain()
