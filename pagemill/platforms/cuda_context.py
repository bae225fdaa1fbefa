"""`EarlyContext`: the context of a CUDA device, made on a thread by the driver's own functions.

Which needs neither torch nor Python's lock, so that it takes no time beside the import of torch. Torch uses the same
context: that of the device, which there is one of in a process.
"""

import ctypes
from threading import Thread
from typing import Final

LIBRARY: Final = "libcuda.so.1"


class EarlyContext:
    """Of device number `local_rank` of this process. What fails here fails again, and is told, when torch does it."""

    def __init__(self, local_rank: int) -> None:
        self._thread = Thread(target=_make, args=(local_rank,), name="cuda-context", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is there, or cannot be."""
        self._thread.join()


def _make(local_rank: int) -> None:
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), local_rank) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # for as long as the process lives
