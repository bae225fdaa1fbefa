"""The memory of a queue between processes: counters and slots, one writer, several readers.

Knows nothing about messages or waiting. The memory has no name (shm_memory.py): it is passed to children as a file
descriptor.
"""

import mmap
import threading

from pagemill.errors import TransportError
from pagemill.transport.shm_memory import create_unnamed
from pagemill.utils.math import ceil_div

MAGIC = 0x70616765_6D696C6C
LINE_WORDS = 8
"""Counters that different processes write lie on cache lines of their own."""
WORD_BYTES = 8
NUM_READERS = 1
NUM_SLOTS = 2
SLOT_BYTES = 3
WRITTEN = LINE_WORDS
WRITER_ASLEEP = 2 * LINE_WORDS
FIRST_READER = 3 * LINE_WORDS
READER_WORDS = 2 * LINE_WORDS
SLOT_HEADER_WORDS = 4
SEQUENCE, SIZE, FLAGS = range(3)
FIRST = 1
LAST = 2
"""Flags of a slot: the first and the last part of a message."""
MAX_READERS = 4096


def create_memory(num_readers: int, num_slots: int, slot_bytes: int) -> int:
    """File descriptor of new memory for a ring; the caller closes it. Raises ConfigError when there is none left."""
    slot_bytes = ceil_div(slot_bytes, LINE_WORDS * WORD_BYTES) * LINE_WORDS * WORD_BYTES
    fd = create_unnamed("pagemill-queue", _total_bytes(num_readers, num_slots, slot_bytes))
    with mmap.mmap(fd, 0) as memory, memoryview(memory) as view, view[: FIRST_READER * WORD_BYTES].cast("Q") as words:
        words[NUM_READERS] = num_readers
        words[NUM_SLOTS] = num_slots
        words[SLOT_BYTES] = slot_bytes
        words[0] = MAGIC
    return fd


class Ring:
    """A view of a ring's memory. Each word is written by one process only, as one aligned store of 8 bytes.

    Raises TransportError for memory that is not a ring.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, 0)
        self._view = memoryview(self._memory)
        self._words = self._view.cast("Q")
        words = self._words
        self.num_readers, self.num_slots, self.slot_bytes = (words[i] for i in (NUM_READERS, NUM_SLOTS, SLOT_BYTES))
        sound = words[0] == MAGIC and 0 < self.num_readers <= MAX_READERS
        if not sound or len(self._memory) != _total_bytes(self.num_readers, self.num_slots, self.slot_bytes):
            self.close()
            raise TransportError("the shared memory does not hold a queue")
        self._fence = threading.Lock()
        self._slots_at = FIRST_READER + self.num_readers * READER_WORDS
        self._stride = SLOT_HEADER_WORDS + self.slot_bytes // WORD_BYTES

    def fence(self) -> None:
        """Order the stores before against the loads and stores after: the lock's atomic operation is a barrier."""
        with self._fence:
            pass

    @property
    def written(self) -> int:
        """Slots published since the start."""
        return self._words[WRITTEN]

    def read_by(self, reader: int) -> int:
        """Slots that a reader has given back since the start."""
        return self._words[FIRST_READER + reader * READER_WORDS]

    def is_asleep(self, reader: int) -> bool:
        """Whether a reader wants to be woken when something is published."""
        return self._words[FIRST_READER + reader * READER_WORDS + LINE_WORDS] != 0

    def set_asleep(self, reader: int, asleep: bool) -> None:
        """Called by the reader, before it looks at `written` a last time."""
        self._words[FIRST_READER + reader * READER_WORDS + LINE_WORDS] = asleep
        self.fence()

    @property
    def writer_asleep(self) -> bool:
        """Whether the writer wants to be woken when a slot is given back."""
        return self._words[WRITER_ASLEEP] != 0

    @writer_asleep.setter
    def writer_asleep(self, asleep: bool) -> None:
        self._words[WRITER_ASLEEP] = asleep
        self.fence()

    def payload(self, number: int) -> memoryview:
        """The bytes of the slot that the number-th published slot uses. The caller releases the view."""
        start = (self._slot(number) + SLOT_HEADER_WORDS) * WORD_BYTES
        return self._view[start : start + self.slot_bytes]

    def publish(self, number: int, size: int, flags: int) -> None:
        """Make the number-th slot visible to the readers."""
        slot = self._slot(number)
        self._words[slot + SIZE] = size
        self._words[slot + FLAGS] = flags
        self._words[slot + SEQUENCE] = number
        self.fence()
        self._words[WRITTEN] = number + 1
        self.fence()

    def header(self, number: int) -> tuple[int, int]:
        """Size in bytes and flags of the number-th slot. Raises TransportError if another is there."""
        slot = self._slot(number)
        size = self._words[slot + SIZE]
        if self._words[slot + SEQUENCE] != number or size > self.slot_bytes:
            raise TransportError(f"slot {number} of a queue holds slot {self._words[slot + SEQUENCE]} of {size} bytes")
        return size, self._words[slot + FLAGS]

    def give_back(self, reader: int, number: int) -> None:
        """Called by a reader that is done with the number-th slot."""
        self.fence()
        self._words[FIRST_READER + reader * READER_WORDS] = number + 1
        self.fence()

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
        self._view.release()
        self._memory.close()

    def _slot(self, number: int) -> int:
        return self._slots_at + (number % self.num_slots) * self._stride


def _total_bytes(num_readers: int, num_slots: int, slot_bytes: int) -> int:
    counters = (FIRST_READER + num_readers * READER_WORDS) * WORD_BYTES
    return counters + num_slots * (SLOT_HEADER_WORDS * WORD_BYTES + slot_bytes)
