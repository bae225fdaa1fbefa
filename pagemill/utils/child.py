"""The inside of a `Child` (processes.py): `python -m pagemill.utils.child PIPE REPORTS PARENT`.

Knows nothing about what it will run until it has read it from the pipe.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import threading
from typing import BinaryIO

import msgspec
import setproctitle

from pagemill.utils.gc_pause import gc_paused
from pagemill.utils.processes import LENGTH, ChildSpec, Report
from pagemill.utils.stacks import write_stacks_on_signals

PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _watch(pipe: BinaryIO) -> None:
    """The parent never writes again, so the pipe ends when the parent has."""
    with contextlib.suppress(OSError):
        pipe.read(1)
    os._exit(1)


def main(pipe_fd: int, reports_fd: int, parent: int) -> None:
    """Become what the parent says."""
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    write_stacks_on_signals()
    pipe = os.fdopen(pipe_fd, "rb", buffering=0)
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        os._exit(1)
    spec = msgspec.msgpack.decode(_read(pipe, LENGTH.unpack(head)[0]), type=ChildSpec)
    threading.Thread(target=_watch, args=(pipe,), name="pagemill-lifeline", daemon=True).start()
    setproctitle.setproctitle(spec.title)
    sys.path[:] = spec.paths
    module, _, function = spec.entry.partition(":")
    with gc_paused():
        entry = getattr(importlib.import_module(module), function)
    entry(spec.payload, _reporter(reports_fd))


def _reporter(reports_fd: int) -> Report:
    lock = threading.Lock()

    def report(content: bytes) -> None:
        left = memoryview(LENGTH.pack(len(content)) + content)
        with lock, contextlib.suppress(BrokenPipeError):  # the parent is gone, and this process soon
            while left:
                left = left[os.write(reports_fd, left) :]

    return report


def _read(pipe: BinaryIO, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = pipe.read(num_bytes)
        if not part:
            os._exit(1)
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
    # All is closed. Taking the interpreter and its libraries apart would take up to a second, for nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
