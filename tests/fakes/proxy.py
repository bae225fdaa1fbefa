"""A proxy between two processes that disturbs their connections: resets, silence, half-open ends, slowness.

For tcp and unix sockets, without rights of any kind. It runs an event loop on a thread of its own.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

CHUNK = 1 << 16
T = TypeVar("T")


class _Pair:
    """One connection: a client's end and the server's."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client, self.server = client, server
        self.held = False
        """Nothing travels any more, and no end is told."""

    def abort(self, *writers: asyncio.StreamWriter) -> None:
        for writer in writers or (self.client, self.server):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Listens at `address` ("tcp://127.0.0.1:0" or "ipc:///path"; the attribute tells the port that was taken) and
    connects to what `target` returns then. All methods may be called from any thread."""

    def __init__(self, address: str, target: Callable[[], str]) -> None:
        self._target = target
        self._pairs: list[_Pair] = []
        self._delay_s = 0.0
        self._chunk = CHUNK
        self.num_connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._flowing = asyncio.Event()
        self.address = self._call(self._listen(address))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def reset(self) -> None:
        """Reset all connections."""
        self._call(self._each(_Pair.abort))

    def half_open(self, side: str) -> None:
        """One end of all connections is gone ("client" or "server"); the other learns nothing of it. New connections
        are not disturbed."""

        def cut(pair: _Pair) -> None:
            pair.held = True
            pair.abort(getattr(pair, side))

        self._call(self._each(cut))

    def silence(self) -> None:
        """Nothing travels, in any connection, until `go_on`; what is sent meanwhile travels then."""
        self._call(self._set_flowing(False))

    def go_on(self) -> None:
        """End `silence`."""
        self._call(self._set_flowing(True))

    def slow_down(self, delay_s: float, chunk: int = CHUNK) -> None:
        """Each piece of at most `chunk` bytes takes so long."""
        self._delay_s, self._chunk = delay_s, chunk

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _each(self, action: Callable[[_Pair], object]) -> None:
        for pair in self._pairs:
            action(pair)

    async def _set_flowing(self, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _listen(self, address: str) -> str:
        self._flowing.set()
        if address.startswith("ipc://"):
            self._server = await asyncio.start_unix_server(self._accept, address.removeprefix("ipc://"))
            return address
        host, port = address.removeprefix("tcp://").split(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        return f"tcp://{host}:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        for listener in self._server.sockets:
            self._loop.remove_reader(listener)
        for _ in range(4):  # who has been accepted has a task that has begun: nothing else closes a connection
            await asyncio.sleep(0)
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        pair = None
        try:
            await self._flowing.wait()
            target = self._target()
            if target.startswith("ipc://"):
                back, forth = await asyncio.open_unix_connection(target.removeprefix("ipc://"))
            else:
                host, port = target.removeprefix("tcp://").split(":")
                back, forth = await asyncio.open_connection(host, int(port))
            pair = _Pair(writer, forth)
            self._pairs.append(pair)
            await asyncio.gather(self._pipe(reader, forth, pair), self._pipe(back, writer, pair))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            if pair is not None:
                self._pairs.remove(pair)
                pair.server.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: _Pair) -> None:
        while data := await reader.read(self._chunk):
            await self._flowing.wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            if pair.held:
                break
            writer.write(data)
            await writer.drain()
        if pair.held:
            await asyncio.Event().wait()  # until the test ends: no end hears of the other's
        raise ConnectionResetError
