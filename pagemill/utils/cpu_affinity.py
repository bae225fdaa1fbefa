"""The CPUs that the calling thread may run on. A thread starts with those of the thread that starts it."""

import contextlib
import os


def current_cpus() -> frozenset[int]:
    """Empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def keep_to(cpus: frozenset[int]) -> None:
    """Run on these from now on. No CPUs, or such as are gone by now: as before."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
