"""`ThreadBinding`: the calling thread, and those it starts from then on, kept to CPUs; and their memory to nodes.

Does not know who chose the CPUs, nor what the threads do.
"""

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from pagemill.errors import ConfigError
from pagemill.log import get_logger

logger = get_logger(__name__)

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, which the C library has no function for."""
_DEFAULT = 0
_INTERLEAVE = 3
_NODE_BITS = 1024
TASKS = Path("/proc/self/task")


class ThreadBinding:
    """In force from construction to `release`. Raises ConfigError where CPUs cannot be bound to.

    All threads share the CPUs: there are as many as threads, and the kernel keeps each where it is. A page lies on the
    node of the thread that first writes it, which is the right one for CPUs of one node; for several nodes, pages are
    dealt out over them in turn, as every thread reads weights that any thread wrote.
    """

    def __init__(self, cpus: Sequence[int], nodes: Sequence[int]) -> None:
        if not hasattr(os, "sched_setaffinity"):
            raise ConfigError(f"cpu_threads_bind: {platform.system()} does not bind threads to CPUs; use nobind")
        self._before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise ConfigError(f"cpu_threads_bind: threads cannot be bound to CPUs {list(cpus)}: {error}") from error
        self._cpus = set(cpus)
        self._interleaves = len(nodes) > 1 and _set_memory_policy(_INTERLEAVE, nodes)

    def release(self) -> None:
        """Give every thread that has the CPUs back those of before: also a pool that outlives its first user."""
        for task in TASKS.iterdir():
            try:
                if os.sched_getaffinity(int(task.name)) == self._cpus:
                    os.sched_setaffinity(int(task.name), self._before)
            except OSError as error:  # it has ended, or the CPUs of before are gone
                logger.debug("thread %s keeps its CPUs: %s", task.name, error)
        if self._interleaves:
            _set_memory_policy(_DEFAULT, ())


def _set_memory_policy(mode: int, nodes: Sequence[int]) -> bool:
    """Where pages of this thread, and of those it starts, shall lie. Containers often forbid it; then False."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_uint64 * (_NODE_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    given = (ctypes.byref(mask), ctypes.c_ulong(_NODE_BITS)) if nodes else (None, ctypes.c_ulong(0))
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(ctypes.c_long(number), ctypes.c_long(mode), *given) != 0:
        logger.debug("the memory policy stays as it is: %s", os.strerror(ctypes.get_errno()))
        return False
    return True
