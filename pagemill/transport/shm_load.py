"""`SharedLoad`: how much each API server of one machine has in flight, in memory that all of them see.

Knows nothing about limits. Each has a row of its own, which nobody else writes while it lives; the sum of all rows is
the load of the server. The memory has no name: it is passed to children as a file descriptor and is gone with them.
"""

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from pagemill.errors import TransportError
from pagemill.transport.shm_memory import create_unnamed

MAGIC = 0x70616765_6C6F6164
ROW_WORDS = 8
"""Counters that different processes write lie on cache lines of their own."""
WORD_BYTES = 8
MAX_ROWS = 4096
LOCK_S = 0.5
"""How long the lock is tried for. Its holder has it for microseconds, but while it has it, it may have to wait for a
processor, on a machine that has more to do than it can."""
STUCK_S = 0.002
"""How long it is tried for after it was not had in time: the holder may have been stopped."""
RETRY_S = 0.0005


class Load(NamedTuple):
    """What is in flight."""

    num_requests: int
    """Completions that run or wait."""
    num_queued_tokens: int
    """Prompt tokens of those for which the engine has done nothing yet."""


def create_load(num_rows: int) -> int:
    """File descriptor of new memory with so many rows, all zero; the caller closes it. Raises ConfigError when there is
    no memory left."""
    fd = create_unnamed("pagemill-load", (1 + num_rows) * ROW_WORDS * WORD_BYTES)
    with mmap.mmap(fd, 0) as memory, memoryview(memory) as view, view.cast("Q") as words:
        words[0] = MAGIC
        words[1] = num_rows
    return fd


class SharedLoad:
    """The rows of one server. Each counter is written as one aligned store of 8 bytes.

    Takes the descriptor over. Raises TransportError for memory that is none of this kind.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, 0)
        self._words = memoryview(self._memory).cast("Q")
        self._is_stuck = False
        self._num_rows = self._words[1] if self._words[0] == MAGIC else 0
        if not 0 < self._num_rows <= MAX_ROWS or len(self._words) != (1 + self._num_rows) * ROW_WORDS:
            raise TransportError("the shared memory does not hold the load of API servers")

    def set(self, row: int, load: Load) -> None:
        """Called by the owner of the row; by its parent when the owner is gone."""
        start = (1 + row) * ROW_WORDS
        self._words[start], self._words[start + 1] = load

    def total(self) -> Load:
        """The sum of all rows."""
        starts = range(ROW_WORDS, (1 + self._num_rows) * ROW_WORDS, ROW_WORDS)
        return Load(sum(self._words[at] for at in starts), sum(self._words[at + 1] for at in starts))

    def close(self) -> None:
        """Give the memory and the descriptor back. May be called twice."""
        if self._fd >= 0:
            self._words.release()
            self._memory.close()
            os.close(self._fd)
            self._fd = -1

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Keep other processes from doing the same in the body; whether that worked in time. Ends with the process."""
        locked = self._try_lock()
        try:
            yield locked
        finally:
            if locked:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        # A lock of the process, and not of the open file: the descriptor is inherited, so all have the same open file.
        begun = time.monotonic()
        deadline = begun + (STUCK_S if self._is_stuck else LOCK_S)
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_stuck = False
                return True
            except OSError:
                now = time.monotonic()
                if now > deadline:
                    self._is_stuck = True
                    return False
                if now < begun + STUCK_S:
                    os.sched_yield()
                else:
                    time.sleep(RETRY_S)
