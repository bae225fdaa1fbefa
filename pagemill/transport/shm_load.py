"""`SharedLoad`: how much each API server of one machine has in flight, in all and for each client, and what is left of
the clients' allowances, in memory that all of them see.

Knows nothing about limits. Each has a row of its own, which nobody else writes while it lives; the sum of all rows is
the load of the server. Allowances are common, and written under the lock. The memory has no name: it is passed to
children as a file descriptor and is gone with them.
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
LINE_WORDS = 8
"""Counters that different processes write lie on cache lines of their own."""
LOAD_WORDS = 2
ALLOWANCE_WORDS = 2
MAX_ALLOWANCES = LINE_WORDS // ALLOWANCE_WORDS
"""Of each client."""
WORD_BYTES = 8
MAX_ROWS = 4096
MAX_CLIENTS = 65_536
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


class Remainder(NamedTuple):
    """What is left of an allowance."""

    amount: float
    at: float
    """When, in seconds of the machine's monotonic clock; 0: nobody has used it yet."""


def create_load(num_rows: int, num_clients: int = 1) -> int:
    """File descriptor of new memory with so many rows, for so many clients, all zero; the caller closes it. Raises
    ConfigError when there is no memory left."""
    fd = create_unnamed("pagemill-load", _num_words(num_rows, num_clients) * WORD_BYTES)
    with mmap.mmap(fd, 0) as memory, memoryview(memory) as view, view.cast("Q") as words:
        words[0] = MAGIC
        words[1] = num_rows
        words[2] = num_clients
    return fd


def _row_words(num_clients: int) -> int:
    """Of the load in all and of each client, in whole cache lines."""
    words = LOAD_WORDS * (1 + num_clients)
    return -(-words // LINE_WORDS) * LINE_WORDS


def _num_words(num_rows: int, num_clients: int) -> int:
    """A line that says how many there are, the rows, and a line of allowances for each client."""
    return LINE_WORDS + num_rows * _row_words(num_clients) + num_clients * LINE_WORDS


class SharedLoad:
    """The rows of one server. Each counter is written as one aligned store of 8 bytes.

    Takes the descriptor over. Raises TransportError for memory that is none of this kind.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, 0)
        self._words = memoryview(self._memory).cast("Q")
        self._numbers = memoryview(self._memory).cast("d")
        self._is_stuck = False
        is_known = self._words[0] == MAGIC
        self._num_rows = self._words[1] if is_known else 0
        self.num_clients = self._words[2] if is_known else 0
        if not (0 < self._num_rows <= MAX_ROWS and 0 < self.num_clients <= MAX_CLIENTS) or len(
            self._words
        ) != _num_words(self._num_rows, self.num_clients):
            raise TransportError("the shared memory does not hold the load of API servers")
        self._row_words = _row_words(self.num_clients)
        self._allowances_at = LINE_WORDS + self._num_rows * self._row_words

    def set(self, row: int, load: Load) -> None:
        """What is in flight in all. Called by the owner of the row."""
        self._set(LINE_WORDS + row * self._row_words, load)

    def set_client(self, row: int, client: int, load: Load) -> None:
        """What is in flight for a client, by its number. Called by the owner of the row."""
        self._set(LINE_WORDS + row * self._row_words + LOAD_WORDS * (1 + client), load)

    def clear(self, row: int) -> None:
        """Nothing is in flight. Called by the parent when the owner of the row is gone."""
        for place in range(1 + self.num_clients):
            self._set(LINE_WORDS + row * self._row_words + LOAD_WORDS * place, Load(0, 0))

    def total(self) -> Load:
        """The sum of all rows."""
        return self._sum(0)

    def client(self, client: int) -> Load:
        """The same for one client."""
        return self._sum(LOAD_WORDS * (1 + client))

    def remainder(self, client: int, which: int) -> Remainder:
        """What is left of one of a client's allowances."""
        at = self._allowances_at + client * LINE_WORDS + which * ALLOWANCE_WORDS
        return Remainder(self._numbers[at], self._numbers[at + 1])

    def set_remainder(self, client: int, which: int, remainder: Remainder) -> None:
        """What is left now. Called with the lock."""
        at = self._allowances_at + client * LINE_WORDS + which * ALLOWANCE_WORDS
        self._numbers[at], self._numbers[at + 1] = remainder

    def _set(self, at: int, load: Load) -> None:
        self._words[at], self._words[at + 1] = load

    def _sum(self, offset: int) -> Load:
        starts = range(LINE_WORDS + offset, self._allowances_at, self._row_words)
        return Load(sum(self._words[at] for at in starts), sum(self._words[at + 1] for at in starts))

    def close(self) -> None:
        """Give the memory and the descriptor back. May be called twice."""
        if self._fd >= 0:
            self._words.release()
            self._numbers.release()
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
