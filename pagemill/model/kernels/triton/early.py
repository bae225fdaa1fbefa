"""`begin`: what the first kernel of a process waits for and no kernel, no torch and little of Python is needed for.

That is the hash of Triton's compiler, hundreds of megabytes, which is part of each kernel's name on disk. It is not the
module in C by which Triton talks to the driver: descriptors of tensors that one load of it has made are refused by
launchers made before, so nobody but Triton may load it.
"""

from contextlib import suppress
from functools import cache
from threading import Thread


@cache
def begin() -> Thread:
    """Begin it on a thread, once in a process. What fails fails again, and is told, when a kernel is compiled."""
    thread = Thread(target=_get_ready, name="compiler", daemon=True)
    thread.start()
    return thread


def _get_ready() -> None:
    with suppress(Exception):
        # Deferred: whoever begins goes on meanwhile. Triton may not be installed.
        from triton.runtime.cache import triton_key

        triton_key()
