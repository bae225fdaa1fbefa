"""`GrammarChecker`: whether a grammar can be used, found out in another process within a time limit.

Does not know what a grammar is for. What was found is remembered, so that each grammar is tried once.
"""

import concurrent.futures
import contextlib
import hashlib
import signal
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from pagemill.catalog.grammars import GUIDANCE
from pagemill.errors import EngineOverloadedError, TransportError
from pagemill.grammar.checker import CheckerSpec
from pagemill.grammar.translate import translated
from pagemill.grammar.vocabulary import TokenTable
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.transport.stream_frames import receive_frame, send_frame
from pagemill.utils.processes import Child
from pagemill.utils.sized_cache import SizedCache

ENTRY: Final = "pagemill.grammar.checker:run"
CHECK_S: Final = 1.5
"""Processor time that the library gets for one grammar; nearly all take a few milliseconds."""
WAIT_FACTOR: Final = 8
"""Times as long, a grammar is waited for: on a busy machine the process may have to wait as well."""
START_S: Final = 60.0
"""What the process gets for its start."""
GONE_S: Final = 1.0
"""What a process that has closed its socket gets to be gone."""
_FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit statuses that say nothing about the grammar that was being looked at."""
MAX_WAITING: Final = 64
MAX_REMEMBERED: Final = 8192


class GrammarChecker:
    """One process, started with the first grammar and again after one that took too long. From any thread."""

    def __init__(self, table: Callable[[], TokenTable], check_s: float = CHECK_S, backend: str = GUIDANCE) -> None:
        """`table`: makes the model's vocabulary when it is first needed; what it raises as ValueError is what is wrong
        with every grammar; `backend`: what follows them."""
        self._backend = backend
        self._check_s = check_s
        self._table = table
        self._known: SizedCache[bytes, str] = SizedCache(MAX_REMEMBERED)
        """Digests of grammars, and what is wrong with them."""
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._process: _Process | None = None
        # One thread that lives as long as this: a child ends with the thread that started it.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="pagemill-grammars")

    def known(self, source: str) -> str | None:
        """What is wrong with a grammar that was looked at before, empty when nothing is; None for others."""
        digest = _digest(source)
        with self._lock:
            return self._known.get(digest)

    def submit(self, source: str) -> concurrent.futures.Future[str]:
        """What is wrong with a grammar, in time; empty when nothing is. Raises EngineOverloadedError when too many
        wait for that."""
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise EngineOverloadedError(f"{self._num_waiting} grammars are being checked already; try again later")
            self._num_waiting += 1
        found = self._thread.submit(self._check, source)
        found.add_done_callback(self._done)  # also when whoever waits for it goes away before it is begun
        return found

    def close(self) -> None:
        """End the process that checks grammars, and forget those that wait for it."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._stop()

    def _done(self, found: concurrent.futures.Future[str]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _check(self, source: str) -> str:
        found = self.known(source)
        if found is not None:
            return found
        try:
            return self._ask(source)
        except ValueError as error:
            return str(error)

    def _ask(self, source: str) -> str:
        """What the process says, or that the grammar ended it. Raises EngineOverloadedError when it does not start or
        gets no time, ValueError for a model without a vocabulary."""
        too_much = f"it takes more than {self._check_s:g} s or too much memory to make a grammar of it"
        for _ in range(2):
            found = self._start().problem(source, WAIT_FACTOR * self._check_s)
            if found is not None:
                self._remember(source, found)
                return found
            status = self._stop()
            if status is None:
                raise EngineOverloadedError("the machine is too busy to check a grammar; try again later")
            if status not in _FROM_OUTSIDE:
                self._remember(source, too_much)
                break
        with contextlib.suppress(RuntimeError):  # this is being closed
            # The next grammar need not wait until another process has started.
            self._thread.submit(self._start)
        return too_much

    def _start(self) -> "_Process":
        """The process, which runs."""
        if self._process is not None and not self._process.runs:
            self._stop()
        if self._process is None:
            self._process = _Process(self._table(), self._check_s, self._backend)
        return self._process

    def _remember(self, source: str, found: str) -> None:
        digest = _digest(source)
        with self._lock:
            self._known.put(digest, found)

    def _stop(self) -> int | None:
        """The exit status, if it ended by itself."""
        process, self._process = self._process, None
        return None if process is None else process.stop()


class _Process:
    """The process and the socket to it."""

    def __init__(self, table: TokenTable, check_s: float, backend: str) -> None:
        """Raises EngineOverloadedError when it does not start in time."""
        self._socket, there = socket.socketpair()
        with there:
            payload = msgspec.msgpack.encode(CheckerSpec(there.fileno(), backend, table, check_s))
            self._child = Child(ENTRY, "pagemill: grammars", payload, pass_fds=[there.fileno()])
        self._silent = False
        if self.problem(translated(StructuredOutputsParams(choice=["a"]), backend=backend), START_S) is None:
            self.stop()
            raise EngineOverloadedError("the process that checks grammars did not start; try again later")

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._child.exit_status is None

    def problem(self, source: str, timeout_s: float) -> str | None:
        """What the process says; None when it says nothing in time, or ends."""
        self._socket.settimeout(timeout_s)
        try:
            send_frame(self._socket, source.encode())
            return receive_frame(self._socket).decode()
        except TimeoutError:
            self._silent = True
        except (EOFError, OSError, TransportError):
            pass
        return None

    def stop(self) -> int | None:
        """End it. Its exit status, if it ended by itself."""
        self._socket.close()
        status = None if self._silent else self._child.wait(GONE_S)
        self._child.kill()
        return status


def _digest(source: str) -> bytes:
    return hashlib.blake2b(source.encode(), digest_size=16).digest()
