"""A queue between processes in shared memory: one writer, N readers, every reader gets every message.

Knows frames of bytes, not what they mean. A message is written once, however many read it; one that is larger than a
slot is cut into several.

    writer_end, reader_ends = create_queue(num_readers=2)
    child = subprocess.Popen([...], pass_fds=reader_ends[0].fds())   # the child gets the end's numbers as an argument
    reader_ends[0].close()                                           # so that the child's death is seen here
    QueueWriter(writer_end).put([b"body", b"array"], timeout_s=5)
    QueueReader(reader_end).get(timeout_s=1)                         # in the child: frames, or None

Whoever waits looks again for a few microseconds, then yields, then sleeps until the other side writes a byte into a
socket pair; the same pair tells of the other side's death.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pagemill.errors import PeerGoneError, TransportError
from pagemill.transport.codec import DEFAULT_LIMITS, Frame, Limits, check_limits
from pagemill.transport.shm_ring import FIRST, LAST, Ring, create_memory

NUM_SLOTS = 16
SLOT_BYTES = 128 * 1024
YIELD_S = 100e-6
"""How long whoever waits yields its core before it sleeps: about what waking up costs."""
MAX_SLEEP_S = 0.1
"""A sleeper looks again this often, in case a wake-up was lost."""
_COUNT, _LENGTH = struct.Struct("<Q"), struct.Struct("<Q")


class QueueEnd(msgspec.Struct, frozen=True):
    """One end of a queue as file descriptors, to be passed to the process that opens it. Holds them until `close`."""

    memory_fd: int
    socket_fds: list[int]
    """One for the reader; one per reader for the writer."""
    index: int = 0
    """Which reader; 0 for the writer."""

    def fds(self) -> list[int]:
        """What the process needs to inherit."""
        return [self.memory_fd, *self.socket_fds]

    def close(self) -> None:
        """Close this process's copies: after the child has inherited its own."""
        for fd in self.fds():
            os.close(fd)


def create_queue(
    num_readers: int, *, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES
) -> tuple[QueueEnd, list[QueueEnd]]:
    """The writer's end and the readers' ends of a new queue. Raises ConfigError when there is no memory for it."""
    memory_fd = create_memory(num_readers, num_slots, slot_bytes)
    pairs = [socket.socketpair() for _ in range(num_readers)]
    readers = [QueueEnd(os.dup(memory_fd), [pair[1].detach()], index) for index, pair in enumerate(pairs)]
    return QueueEnd(memory_fd, [pair[0].detach() for pair in pairs]), readers


class QueueWriter:
    """The end that writes. Takes the descriptors of `end` over. Not thread-safe."""

    def __init__(self, end: QueueEnd) -> None:
        self._ring = Ring(end.memory_fd)
        os.close(end.memory_fd)
        self._sockets = [_open(fd) for fd in end.socket_fds]
        self._next = self._ring.written
        self._free_until = 0
        """Slots below this number may be written without looking at the readers again."""

    def put(self, frames: Sequence[Frame], timeout_s: float) -> None:
        """Publish a message. Raises TimeoutError when a reader does not make room in time (the message is then
        dropped for all), and PeerGoneError when a reader is gone."""
        deadline = time.monotonic() + timeout_s
        parts = [_COUNT.pack(len(frames)) + b"".join(_LENGTH.pack(memoryview(frame).nbytes) for frame in frames)]
        flags = FIRST
        for size, chunk, is_last in _chunks([*parts, *frames], self._ring.slot_bytes):
            if self._next >= self._free_until:
                self._wait_for_room(deadline)
            with self._ring.payload(self._next) as payload:
                at = 0
                for piece in chunk:
                    payload[at : at + len(piece)] = piece
                    at += len(piece)
            self._ring.publish(self._next, size, flags | (LAST if is_last else 0))
            self._next += 1
            flags = 0
            self._wake_readers()

    def close(self) -> None:
        """Give the memory and the sockets back; the readers see the end of the queue. May be called twice."""
        if self._sockets:
            self._ring.close()
            for sock in self._sockets:
                sock.close()
            self._sockets = []

    def _wait_for_room(self, deadline: float) -> None:
        def has_room() -> bool:
            slowest = min(self._ring.read_by(reader) for reader in range(self._ring.num_readers))
            self._free_until = slowest + self._ring.num_slots
            return self._next < self._free_until

        def sleep(asleep: bool) -> None:
            self._ring.writer_asleep = asleep

        if not _wait(has_room, sleep, self._sockets, deadline):
            counts = [self._ring.read_by(reader) for reader in range(self._ring.num_readers)]
            slow = counts.index(min(counts))
            raise TimeoutError(
                f"reader {slow} of a queue made no room in time: {self._next - counts[slow]} slots unread"
            )

    def _wake_readers(self) -> None:
        for reader, sock in enumerate(self._sockets):
            if self._ring.is_asleep(reader):
                _wake(sock, f"reader {reader} of a queue is gone")


class QueueReader:
    """An end that reads. Takes the descriptors of `end` over. Not thread-safe."""

    def __init__(self, end: QueueEnd, limits: Limits = DEFAULT_LIMITS) -> None:
        self._ring = Ring(end.memory_fd)
        os.close(end.memory_fd)
        self._socket = _open(end.socket_fds[0])
        self._index = end.index
        self._limits = limits
        self._next = self._ring.read_by(end.index)
        self._partial: bytearray | None = None
        """Parts of the message that is being received; None while parts are skipped up to the next first one."""

    def fileno(self) -> int:
        """Readable when there is something to look at, while `set_asleep(True)` holds."""
        return self._socket.fileno()

    def has_message(self) -> bool:
        """Whether a part of a message has been published that was not read yet."""
        return self._ring.written > self._next

    def ended(self) -> bool:
        """Whether the writer is gone and all was read."""
        try:
            is_open = self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            is_open = True
        except OSError:
            is_open = False
        return not is_open and not self.has_message()

    def set_asleep(self, asleep: bool) -> None:
        """Ask the writer for a wake-up; look at `has_message` once more before sleeping."""
        self._ring.set_asleep(self._index, asleep)

    def get(self, timeout_s: float) -> list[memoryview] | None:
        """The next message, as writable views of one buffer of its own; None when none came in time. Raises
        PeerGoneError when the writer is gone and all was read, TransportError (the message is dropped) for bytes
        that are no message or a message over the limits."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.has_message() and not _wait(self.has_message, self.set_asleep, [self._socket], deadline):
                return None
            message = self._read_slot()
            if message is not None:
                return _split(message, self._limits)

    def close(self) -> None:
        """Give the memory and the socket back; the writer sees that this reader is gone. May be called twice."""
        if self._socket.fileno() >= 0:
            self._ring.close()
            self._socket.close()

    def _read_slot(self) -> bytearray | None:
        """Take one slot; the message, when it was its last part."""
        self._ring.fence()
        try:
            size, flags = self._ring.header(self._next)
            with self._ring.payload(self._next) as payload:
                part = bytearray(payload[:size])
        except TransportError:
            self._partial = None
            raise
        finally:
            self._ring.give_back(self._index, self._next)
            self._next += 1
            if self._ring.writer_asleep:
                _wake(self._socket, "")
        if flags & FIRST:
            self._partial = part
        elif self._partial is not None:
            self._partial += part
        if self._partial is not None and len(self._partial) > self._limits.max_message_bytes:
            self._partial = None
            raise TransportError(f"a message of more than {self._limits.max_message_bytes} bytes")
        if not flags & LAST:
            return None
        message, self._partial = self._partial, None
        return message


def wait_any(readers: Sequence[QueueReader], timeout_s: float) -> bool:
    """Wait until one of the readers has something to read. False when none had in time, or a writer is gone:
    `get` then says so."""
    deadline = time.monotonic() + timeout_s

    def ready() -> bool:
        return any(reader.has_message() for reader in readers)

    def sleep(asleep: bool) -> None:
        for reader in readers:
            reader.set_asleep(asleep)

    try:
        return ready() or _wait(ready, sleep, [reader._socket for reader in readers], deadline)
    except PeerGoneError:
        return False


def _wait(ready: Callable[[], bool], sleep: Callable[[bool], None], sockets: list[socket.socket], until: float) -> bool:
    """Wait until `ready`, or `until` (time.monotonic): whether it is. Raises PeerGoneError when a socket has ended."""
    now = time.monotonic()
    if now >= until:
        return ready()
    yield_until = min(until, now + YIELD_S)
    while time.monotonic() < yield_until:
        if ready():
            return True
        os.sched_yield()
    poller = select.poll()
    for sock in sockets:
        poller.register(sock, select.POLLIN)
    by_fd = {sock.fileno(): sock for sock in sockets}
    try:
        while True:
            sleep(True)
            remaining = until - time.monotonic()
            if ready() or remaining <= 0:
                return ready()
            gone = [fd for fd, _ in poller.poll(min(remaining, MAX_SLEEP_S) * 1000) if not _drain(by_fd[fd])]
            if gone and not ready():
                raise PeerGoneError("the process at the other end of a queue is gone")
    finally:
        sleep(False)


def _open(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock


def _drain(sock: socket.socket) -> bool:
    """Take the wake-ups; False when the other side has closed or died."""
    try:
        while True:
            if not sock.recv(4096):
                return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _wake(sock: socket.socket, gone: str) -> None:
    """Wake the other side. Raises PeerGoneError with the text `gone`, or nothing when it is empty."""
    try:
        sock.send(b"w")
    except BlockingIOError:
        return  # enough wake-ups are waiting
    except OSError as error:
        if gone:
            raise PeerGoneError(gone) from error


def _chunks(parts: Sequence[Frame], slot_bytes: int) -> Iterator[tuple[int, list[memoryview], bool]]:
    """(bytes, pieces, whether it is the last) of each slot that a message fills."""
    views = [memoryview(part).cast("B") for part in parts]
    remaining = sum(len(view) for view in views)
    chunk: list[memoryview] = []
    room = slot_bytes
    for view in views:
        while len(view):
            piece, view = view[:room], view[room:]
            chunk.append(piece)
            room -= len(piece)
            if room == 0:
                remaining -= slot_bytes
                yield slot_bytes, chunk, remaining == 0
                chunk = []
                room = slot_bytes
    if chunk:
        yield slot_bytes - room, chunk, True


def _split(message: bytearray, limits: Limits) -> list[memoryview]:
    """The frames of a message. Raises TransportError."""
    view = memoryview(message)
    if len(view) < _COUNT.size:
        raise TransportError(f"a queue holds {len(view)} bytes where a message was expected")
    (num_frames,) = _COUNT.unpack_from(view)
    start = _COUNT.size + num_frames * _LENGTH.size
    if num_frames > limits.max_frames or start > len(view):
        raise TransportError(f"a message of {num_frames} frames in {len(view)} bytes; {limits.max_frames} are allowed")
    sizes = [size for (size,) in _LENGTH.iter_unpack(view[_COUNT.size : start])]
    check_limits(sizes, limits)
    if start + sum(sizes) != len(view):
        raise TransportError(f"a message of {start + sum(sizes)} bytes in {len(view)}")
    frames = []
    for size in sizes:
        frames.append(view[start : start + size])
        start += size
    return frames
