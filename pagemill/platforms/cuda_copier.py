"""`CudaCopier`: the CUDA driver's own functions, for threads that are not Python's."""

import ctypes
from functools import cache
from typing import Any, Final

import torch

from pagemill.platforms.interface import Copier, CopierCalls

_LIBRARY: Final = "libcuda.so.1"
_FUNCTIONS: Final = {
    "set_context": "cuCtxSetCurrent",
    "make_stream": "cuStreamCreate",
    "end_stream": "cuStreamDestroy_v2",
    "make_event": "cuEventCreate",
    "end_event": "cuEventDestroy_v2",
    "record": "cuEventRecord",
    "hold": "cuStreamWaitEvent",
    "finish": "cuEventSynchronize",
    "copy": "cuMemcpyHtoDAsync_v2",
    "pin": "cuMemHostRegister_v2",
    "unpin": "cuMemHostUnregister",
}


class CudaCopier(Copier):
    """For the current device and the current stream of the thread that makes it. Raises OSError where the driver's
    library is not there, or has no context for the device."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device()
        stream = torch.cuda.current_stream().cuda_stream
        driver = _driver()
        context = ctypes.c_void_p()
        # Torch's own; that it is asked for once more does no harm: it lives as long as the process.
        status = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(self._device))
        status = status or driver.cuCtxSetCurrent(context)
        if status:
            raise OSError(self.describe(status))
        addresses = {name: _address(getattr(driver, function)) for name, function in _FUNCTIONS.items()}
        self.calls = CopierCalls(**addresses, context=context.value or 0, main_stream=stream, keeps=1)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def describe(self, status: int) -> str:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        return f"the CUDA driver says {status}, {(text.value or b'unknown error').decode(errors='replace')}"


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _driver() -> Any:
    """Which CUDA's own libraries have loaded already."""
    return ctypes.CDLL(_LIBRARY)
