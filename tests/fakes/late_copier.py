"""`LateCopier`: a `Copier` of host memory whose copies run late, on a thread for each stream, so that what does not
wait for them finds nothing. What is done to tensors by the test itself is done at once: the main stream is the test."""

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from queue import SimpleQueue
from typing import Any

from pagemill.platforms.interface import Copier, CopierCalls

LATE_S = 0.002
CONTEXT = 77
MAIN = 1
FAILED = 700

_INT = ctypes.c_int
_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(ctypes.c_uint64)
_UINT = ctypes.c_uint
_SIZE = ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "set_context": (_POINTER,),
    "make_stream": (_OUT, _UINT),
    "end_stream": (_POINTER,),
    "make_event": (_OUT, _UINT),
    "end_event": (_POINTER,),
    "record": (_POINTER, _POINTER),
    "hold": (_POINTER, _POINTER, _UINT),
    "finish": (_POINTER,),
    "copy": (ctypes.c_uint64, _POINTER, _SIZE, _POINTER),
    "pin": (_POINTER, _SIZE, _UINT),
    "unpin": (_POINTER,),
}


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


class LateCopier(Copier):
    """`refuses_to_pin`: copies are then from memory that is not pinned. `fails`: functions that do. `keeps`: whether
    what is pinned stays so."""

    def __init__(
        self, *, refuses_to_pin: bool = False, fails: tuple[str, ...] = (), free: int = 1 << 40, keeps: bool = False
    ) -> None:
        self.fails = {*fails, "pin"} if refuses_to_pin else set(fails)
        self.free = free
        self.pinned: dict[int, int] = {}
        self.most_pinned = 0
        self.copies: list[tuple[int, int]] = []
        """(target, bytes), as they were enqueued."""
        self.errors: list[str] = []
        self._threads: set[int] = set()
        self._held: set[int] = set()
        """Threads that have let a stream wait for the main stream since their last copy."""
        self._events: dict[int, _Event] = {}
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count(100)
        self._changed = threading.Condition()
        self._reading: list[tuple[int, int]] = []
        self._functions = {name: self._function(name) for name in _SIGNATURES}
        addresses = {name: ctypes.cast(function, _POINTER).value or 0 for name, function in self._functions.items()}
        assert {*addresses, "context", "main_stream", "keeps"} == {made.name for made in fields(CopierCalls)}
        self.calls = CopierCalls(**addresses, context=CONTEXT, main_stream=MAIN, keeps=int(keeps))

    def _function(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            try:
                return FAILED if name in self.fails else getattr(self, f"_{name}")(*arguments) or 0
            except Exception as error:
                self.errors.append(f"{name}: {error!r}")
                return FAILED + 1

        return ctypes.CFUNCTYPE(_INT, *_SIGNATURES[name])(call)

    @property
    def is_over(self) -> bool:
        """Whether all that was made or pinned has been given back, and nothing was done too early."""
        return not (self.pinned or self._events or self._streams or self._reading or self.errors)

    def free_bytes(self) -> int:
        return self.free

    def describe(self, status: int) -> str:
        return f"the fake says {status}"

    def _set_context(self, context: int) -> None:
        assert context == CONTEXT
        self._threads.add(threading.get_ident())

    def _pin(self, address: int, num_bytes: int, _flags: int) -> None:
        with self._changed:
            self.pinned[address] = num_bytes
            self.most_pinned = max(self.most_pinned, sum(self.pinned.values()))

    def _unpin(self, address: int) -> None:
        with self._changed:
            size = self.pinned.pop(address)
            assert not any(address <= begin < address + size for begin, _ in self._reading)

    def _make_stream(self, made: Any, _flags: int) -> None:
        number = next(self._numbers)
        stream = _Stream(threading.Thread(target=lambda: self._run(stream), daemon=True))
        self._streams[number] = stream
        stream.thread.start()
        made[0] = number

    def _end_stream(self, stream: int) -> None:
        self._streams.pop(stream).work.put(None)

    def _make_event(self, made: Any, _flags: int) -> None:
        number = next(self._numbers)
        self._events[number] = _Event()
        made[0] = number

    def _end_event(self, event: int) -> None:
        del self._events[event]

    def _record(self, event: int, stream: int) -> None:
        found = self._events[event]
        with self._changed:
            found.recorded += 1
        found.on_main = stream == MAIN
        if found.on_main:
            self._happen(found)
        else:
            self._streams[stream].work.put(lambda: self._happen(found))

    def _hold(self, stream: int, event: int, _flags: int) -> None:
        found = self._events[event]
        version = found.recorded
        if stream == MAIN:
            self._wait(found, version)
            return
        if found.on_main:
            self._held.add(threading.get_ident())
        self._streams[stream].work.put(lambda: self._wait(found, version))

    def _finish(self, event: int) -> None:
        found = self._events[event]
        self._wait(found, found.recorded)

    def _copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        assert threading.get_ident() in self._threads, "a thread without the context"
        assert threading.get_ident() in self._held, "a copy that waits for nothing: its target may be in use"
        self._held.remove(threading.get_ident())
        self.copies.append((target, num_bytes))
        if not any(begin <= source and source + num_bytes <= begin + size for begin, size in self.pinned.items()):
            kept = ctypes.create_string_buffer(ctypes.string_at(source, num_bytes), num_bytes)
            self._streams[stream].work.put(lambda: ctypes.memmove(target, kept, num_bytes))
            return
        with self._changed:
            self._reading.append((source, num_bytes))
        self._streams[stream].work.put(lambda: self._copy_late(target, source, num_bytes))

    def _copy_late(self, target: int, source: int, num_bytes: int) -> None:
        time.sleep(LATE_S)
        ctypes.memmove(target, source, num_bytes)
        with self._changed:
            self._reading.remove((source, num_bytes))

    def _happen(self, event: _Event) -> None:
        with self._changed:
            event.happened += 1
            self._changed.notify_all()

    def _wait(self, event: _Event, version: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: event.happened >= version)

    @staticmethod
    def _run(stream: _Stream) -> None:
        while (step := stream.work.get()) is not None:
            step()
