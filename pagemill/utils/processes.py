"""`Child`: a process of ours, started from nothing: a fresh interpreter that calls "module:function" with bytes.

Knows nothing about what the child does. A fresh interpreter instead of `multiprocessing`: nothing is pickled, the
user's script is not imported again (it needs no __main__ guard), and no lock, thread or CUDA context is inherited by
a fork.
"""

import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

LENGTH = struct.Struct("!I")
STOP_GRACE_S = 5.0
TERMINATE_S = 3.0
MAX_REPORT_BYTES = 1 << 24


Report = Callable[[bytes], None]
"""Sends bytes to the parent; they arrive whole and in order."""


class ChildSpec(msgspec.Struct, frozen=True):
    """The first message to a child, over a pipe: nothing of it can be seen in a list of processes."""

    entry: str
    """"module:function", called with `payload` and a function that sends reports to the parent."""
    title: str
    payload: bytes
    paths: list[str]
    """The parent's sys.path, so that the child finds the same modules."""


class Child:
    """A running child. It dies with its parent, however that dies: the pipe between them then closes, and the kernel
    kills it too where that exists (Linux; for which the thread that starts it must live as long as the parent).

    Ctrl-C in a terminal does not reach it, as it is in a process group of its own: its parent decides. `pass_fds` are
    open in it under the same numbers.
    """

    def __init__(self, entry: str, title: str, payload: bytes, pass_fds: Sequence[int] = ()) -> None:
        self.title = title
        reader, self._lifeline = os.pipe()
        self._reports, writer = os.pipe()
        self._unread = b""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pagemill.utils.child", str(reader), str(writer), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                # Said, and not inherited: another thread may be moving the C library's copy, as setproctitle does.
                env=dict(os.environ),
                pass_fds=[reader, writer, *pass_fds],
                process_group=0,
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(reader)
            os.close(writer)
        spec = msgspec.msgpack.encode(ChildSpec(entry, title, payload, sys.path))
        # A payload may exceed the pipe's buffer, and a child that dies early never reads it: not on this thread.
        threading.Thread(target=self._send_spec, args=(spec,), name="pagemill-child-spec", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: minus the signal that killed it."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit status; None when it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def report(self, timeout_s: float) -> bytes | None:
        """The next report; None when none came in time. Raises EOFError when the child is gone, or announces a report
        above MAX_REPORT_BYTES."""
        deadline = time.monotonic() + timeout_s
        while True:
            if len(self._unread) >= LENGTH.size:
                num_bytes = LENGTH.unpack_from(self._unread)[0]
                if num_bytes > MAX_REPORT_BYTES:
                    raise EOFError(f"{self.title} announced a report of {num_bytes} bytes, and is not read any more")
                end = LENGTH.size + num_bytes
                if len(self._unread) >= end:
                    report, self._unread = self._unread[LENGTH.size : end], self._unread[end:]
                    return report
            if self._reports < 0:
                raise EOFError(f"{self.title} was stopped")
            poll = select.poll()  # and not select, which takes no descriptors above 1,023
            poll.register(self._reports, select.POLLIN)
            if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                return None
            part = os.read(self._reports, 1 << 16)
            if not part:
                raise EOFError(f"{self.title} is gone")
            self._unread += part

    def signal(self, number: int) -> None:
        """Send a signal; nothing when it is gone."""
        self._process.send_signal(number)

    def stop(self, grace_s: float = STOP_GRACE_S, terminate_s: float = TERMINATE_S) -> int:
        """Wait `grace_s` for it to end by itself (it was asked to by other means), then SIGTERM, then SIGKILL."""
        for timeout_s, number in ((grace_s, signal.SIGTERM), (terminate_s, signal.SIGKILL)):
            status = self.wait(timeout_s)
            if status is not None:
                self._close()
                return status
            self.signal(signal.SIGCONT)  # a stopped process gets no SIGTERM before it goes on
            self.signal(number)
        status = self._process.wait()
        self._close()
        return status

    def kill(self) -> int:
        """SIGKILL, now."""
        return self.stop(0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _send_spec(self, spec: bytes) -> None:
        try:
            with os.fdopen(os.dup(self._lifeline), "wb") as pipe:
                pipe.write(LENGTH.pack(len(spec)) + spec)
        except OSError:  # it died before it listened; its exit status tells
            return

    def _close(self) -> None:
        for end in (self._lifeline, self._reports):
            if end >= 0:
                os.close(end)
        self._lifeline = self._reports = -1


def describe_exit(status: int) -> str:
    """An exit status in words: `exit status 1`, or `killed by SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
