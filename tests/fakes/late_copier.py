"""`LateCopier`: a `Copier` of host memory whose copies run late, on a thread for each stream, so that what does not
wait for them finds nothing. What is done to tensors by the test itself is done at once: the main stream is the test."""

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from pagemill.platforms.interface import Copier

LATE_S = 0.002


@dataclass
class _Event:
    recorded: int = 0
    """How often."""
    happened: int = 0
    on_main: bool = False


@dataclass
class _Stream:
    thread: threading.Thread
    work: SimpleQueue[Callable[[], object] | None] = field(default_factory=SimpleQueue)
    held_for: set[int] = field(default_factory=set)
    """Events of the main stream that were waited for since the last copy."""


class LateCopier(Copier):
    """`refuses_to_pin`: copies are then from memory that is not pinned. `fails`: names of functions that raise."""

    def __init__(self, *, refuses_to_pin: bool = False, fails: tuple[str, ...] = (), free: int = 1 << 40) -> None:
        self.refuses_to_pin = refuses_to_pin
        self.fails = set(fails)
        self.free = free
        self.pinned: dict[int, int] = {}
        self.most_pinned = 0
        self.copies: list[tuple[int, int]] = []
        """(target, bytes), as they were enqueued."""
        self.threads: set[int] = set()
        self._events: dict[int, _Event] = {}
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._reading: list[tuple[int, int]] = []
        self.errors: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether all that was made or pinned has been given back, and nothing was done too early."""
        return not (self.pinned or self._events or self._streams or self._reading or self.errors)

    def enter(self) -> None:
        self._may_fail("enter")
        self.threads.add(threading.get_ident())

    def free_bytes(self) -> int:
        return self.free

    def pin(self, address: int, num_bytes: int) -> bool:
        if self.refuses_to_pin:
            return False
        with self._changed:
            self.pinned[address] = num_bytes
            self.most_pinned = max(self.most_pinned, sum(self.pinned.values()))
        return True

    def unpin(self, address: int) -> None:
        with self._changed:
            if any(address <= begin < address + self.pinned[address] for begin, _ in self._reading):
                self.errors.append("unpinned while it is read")
            del self.pinned[address]

    def make_stream(self) -> int:
        self._may_fail("make_stream")
        number = next(self._numbers)
        stream = _Stream(threading.Thread(target=lambda: self._run(number), daemon=True))
        self._streams[number] = stream
        stream.thread.start()
        return number

    def end_stream(self, stream: int) -> None:
        self._streams[stream].work.put(None)
        del self._streams[stream]

    def make_event(self) -> int:
        number = next(self._numbers)
        self._events[number] = _Event()
        return number

    def end_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int, stream: int | None = None) -> None:
        found = self._events[event]
        with self._changed:
            found.recorded += 1
        found.on_main = stream is None
        if stream is None:
            self._happen(found)
        else:
            self._streams[stream].work.put(lambda: self._happen(found))

    def hold(self, event: int, stream: int | None = None) -> None:
        found = self._events[event]
        version = found.recorded
        if stream is None:
            self._wait(found, version)
            return
        if found.on_main:
            self._streams[stream].held_for.add(event)
        self._streams[stream].work.put(lambda: self._wait(found, version))

    def finish(self, event: int) -> None:
        found = self._events[event]
        self._wait(found, found.recorded)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._may_fail("copy")
        if threading.get_ident() not in self.threads:
            self.errors.append("a thread that has not entered")
        if not self._streams[stream].held_for:
            self.errors.append("a copy that waits for nothing: its target may be in use")
        self._streams[stream].held_for.clear()
        self.copies.append((target, num_bytes))
        if not any(begin <= source and source + num_bytes <= begin + size for begin, size in self.pinned.items()):
            kept = ctypes.create_string_buffer(ctypes.string_at(source, num_bytes), num_bytes)
            self._streams[stream].work.put(lambda: ctypes.memmove(target, kept, num_bytes))
            return
        with self._changed:
            self._reading.append((source, num_bytes))
        self._streams[stream].work.put(lambda: self._copy(target, source, num_bytes))

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        time.sleep(LATE_S)
        ctypes.memmove(target, source, num_bytes)
        with self._changed:
            self._reading.remove((source, num_bytes))

    def _may_fail(self, name: str) -> None:
        if name in self.fails:
            raise RuntimeError(f"{name} fails")

    def _happen(self, event: _Event) -> None:
        with self._changed:
            event.happened += 1
            self._changed.notify_all()

    def _wait(self, event: _Event, version: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: event.happened >= version)

    def _run(self, number: int) -> None:
        work = self._streams[number].work
        while (step := work.get()) is not None:
            step()
