"""Frames between a process and its child: whole, and never at the cost of the event loop's other work."""

import asyncio
import socket
import threading

from pagemill.transport.stream_frames import receive_frame, write_frame

LARGE = bytes(range(256)) * (64 << 10)  # 16 MiB


async def test_others_get_turns_while_a_large_frame_is_written() -> None:
    """Also where the other end reads as fast as this one writes, so that writing never has to wait."""
    here, there = socket.socketpair()
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(receive_frame(there)))
    reader.start()
    _, writer = await asyncio.open_unix_connection(sock=here)
    writing = asyncio.create_task(write_frame(writer, LARGE))
    num_turns = 0
    while not writing.done():
        await asyncio.sleep(0)
        num_turns += 1
    await asyncio.to_thread(reader.join)
    writer.close()
    await writer.wait_closed()
    there.close()
    assert received == [LARGE]
    assert num_turns >= 64
