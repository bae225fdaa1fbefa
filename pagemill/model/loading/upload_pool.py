"""`UploadPool`: threads that read files, or memory, and send them to a device.

They are of C (upload_pool.c): a dozen of Python's would wait for each other, and for the one that builds the model, to
have its lock. The library is compiled once for a machine, by a compiler that Triton needs, too.
"""

import ctypes
import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any, Final

from pagemill import envs
from pagemill.errors import ModelError, PagemillError
from pagemill.log import get_logger
from pagemill.model.kernels.build import compiled_once, first_problem
from pagemill.model.kernels.compile import make_library
from pagemill.platforms.interface import Copier

logger = get_logger(__name__)

SOURCE: Final = Path(__file__).with_suffix(".c")
FLAGS: Final = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread")
COMPILERS: Final = ("cc", "gcc", "clang")
COMPILE_LIMIT_S: Final = 60
IN_MEMORY: Final = -1
"""Instead of a file."""
_ENDED_EARLY: Final = -1
_DEVICE_FAILED: Final = -1000
_INT = ctypes.c_int64
_POINTER = ctypes.c_void_p


class Source(ctypes.Structure):
    """Bytes of a file; where `file` is IN_MEMORY, rows in memory."""

    _fields_ = tuple((name, _INT) for name in ("file", "begin", "num_bytes", "row_bytes", "row_stride"))


class PoolLibrary:
    """The exported functions, their argument types declared. What takes no time keeps Python's lock."""

    def __init__(self, path: Path) -> None:
        holding = ctypes.PyDLL(str(path))
        releasing = ctypes.CDLL(str(path))
        status = ctypes.POINTER(_INT)
        self.open = _function(releasing.pm_pool_open, _POINTER, _POINTER, _INT, _INT, _INT, status)
        self.add = _function(holding.pm_pool_add, _POINTER, _POINTER, ctypes.POINTER(Source), ctypes.c_uint64, status)
        self.complete = _function(holding.pm_pool_complete, None, _POINTER)
        self.wait = _function(releasing.pm_pool_wait, _INT, _POINTER, _POINTER)
        self.close = _function(releasing.pm_pool_close, None, _POINTER, _POINTER, _INT)


class UploadPool:
    """What is added is read and sent in its order, by several threads. One thread adds at a time; the one that made the
    copier waits, and closes."""

    def __init__(
        self, library: PoolLibrary, copier: Copier, num_threads: int, buffer_bytes: int, num_buffers: int
    ) -> None:
        """`num_buffers`: pinned buffers of each thread, up to 8, used by turns. Raises PagemillError where the system
        has no more threads, and for a device that has failed."""
        self._library = library
        self._copier = copier
        calls = (_POINTER * len(astuple(copier.calls)))(*astuple(copier.calls))
        status = _INT()
        self._pool = library.open(calls, num_threads, buffer_bytes, num_buffers, status)
        if self._pool is None:
            raise self._failure(status.value, "a file")

    def add(self, source: Source, target: int) -> int:
        """Send a source to an address of the device, in order with what is enqueued on the main stream by now; what
        stands for it. Both are to stay until `wait`, or `close`. Raises PagemillError for a device that has failed."""
        status = _INT()
        upload: int | None = self._library.add(self._pool, source, target, status)
        if upload is None:
            raise self._failure(status.value, "")
        return upload

    def wait(self, upload: int, what: str) -> None:
        """Return when a source has been read, and will have been sent before what is enqueued on the main stream from
        now on. Raises PagemillError where it cannot be; `what`: the source's name, for that."""
        status = self._library.wait(self._pool, upload)
        if status:
            raise self._failure(status, what)

    def complete(self) -> None:
        """Nothing will be added any more: what the threads have goes back to the system as each comes to its end."""
        self._library.complete(self._pool)

    def close(self, left: Sequence[int]) -> None:
        """Return when nothing is read and sent any more. `left`: all that has been added and not been waited for."""
        self._library.close(self._pool, (_POINTER * len(left))(*left), len(left))

    def _failure(self, status: int, what: str) -> PagemillError:
        if status == _ENDED_EARLY:
            return ModelError(f"{what} ends before the last of its tensors: is it still being written?")
        if status <= _DEVICE_FAILED:
            why = self._copier.describe(_DEVICE_FAILED - status)
            return PagemillError(f"weights cannot be sent to the device: {why}")
        if status in (errno.ENOMEM, errno.EAGAIN):
            return PagemillError(f"weights cannot be sent to the device: {os.strerror(status)}")
        return ModelError(f"{what} cannot be read: {os.strerror(status)}")


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype = result
    function.argtypes = arguments
    return function


@cache
def pool_library() -> PoolLibrary | None:
    """The loaded library; None, with one line in the log, where it cannot be compiled."""
    compiler = next(filter(None, map(shutil.which, (envs.c_compiler() or "", *COMPILERS))), None)
    if compiler is None:
        logger.warning("weights go to the GPU slowly: there is no C compiler (%s); set CC", ", ".join(COMPILERS))
        return None
    digest = hashlib.sha256(repr(FLAGS).encode() + SOURCE.read_bytes()).hexdigest()[:20]
    command = [compiler, *FLAGS, str(SOURCE)]
    try:
        path = compiled_once(
            envs.cache_home() / "uploads" / digest, compiler, lambda to: make_library(command, to, COMPILE_LIMIT_S)
        )
        return None if path is None else PoolLibrary(path)
    except (subprocess.SubprocessError, OSError) as error:
        logger.warning("weights go to the GPU slowly: what sends them does not compile: %s", first_problem(error))
        return None
