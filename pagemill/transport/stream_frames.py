"""Frames of bytes over a stream socket between a process and its child: a length, then the bytes.

Knows nothing about what the bytes mean. One end is a coroutine, the other a plain loop.
"""

import asyncio
import socket
import struct

from pagemill.errors import TransportError

MAX_FRAME_BYTES = 64 << 20
PIECE_BYTES = 256 << 10
"""What is handed to the event loop's socket at once: it copies what the other end has not taken yet."""
_LENGTH = struct.Struct("!I")


async def write_frame(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Send a frame, piece by piece, as fast as the other end reads. Raises ConnectionError when it is gone."""
    writer.write(_LENGTH.pack(len(content)))
    view = memoryview(content)
    for start in range(0, len(view), PIECE_BYTES):
        writer.write(view[start : start + PIECE_BYTES])
        await writer.drain()
        await asyncio.sleep(0)  # drain() does not wait while the other end reads as fast as this one writes


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame. Raises TransportError for one that is too long, EOFError when the other end is gone."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise TransportError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return await reader.readexactly(size)


def send_frame(sock: socket.socket, content: bytes) -> None:
    """Send a frame; waits for the other end. Raises OSError when it is gone."""
    sock.sendall(_LENGTH.pack(len(content)))
    sock.sendall(content)


def receive_frame(sock: socket.socket) -> bytes:
    """Wait for the next frame. Raises TransportError for one that is too long, EOFError when the other end is gone."""
    (size,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise TransportError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return bytes(_receive(sock, size))


def _receive(sock: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError("the other end of a socket is gone")
        view = view[count:]
    return content
