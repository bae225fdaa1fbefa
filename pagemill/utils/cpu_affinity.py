"""The CPUs that the calling thread may run on. A thread starts with those of the thread that starts it."""

import contextlib
import os


def current_cpus() -> frozenset[int]:
    """The CPUs that the calling thread may run on; empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def pin_to(cpus: frozenset[int]) -> None:
    """Let the calling thread run on these CPUs only. Without effect for an empty set, or CPUs that do not exist."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
