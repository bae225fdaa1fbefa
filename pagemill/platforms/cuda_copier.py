"""`CudaCopier`: copies to a GPU that any thread enqueues, by the CUDA driver's own calls.

Torch's would do the same, but each takes ten times as long, and Python's lock, which a dozen threads share. Calls that
return at once keep the lock: to give it up and wait for it again costs more than they do.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from pagemill.errors import PagemillError
from pagemill.platforms.interface import Copier

_LIBRARY: Final = "libcuda.so.1"
_NON_BLOCKING: Final = 1
"""cuStreamCreate: not in order with the default stream."""
_NO_TIMING: Final = 2
"""cuEventCreate."""
_SUCCESS: Final = 0
_NOT_READY: Final = 600

_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(_POINTER)
_SIZE = ctypes.c_size_t
_UINT = ctypes.c_uint
_INT = ctypes.c_int


class CudaCopier(Copier):
    """For the current device and the current stream of the thread that makes it. Raises OSError where the driver's
    library is not there."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device()
        self._main = torch.cuda.current_stream()
        self._driver = _driver()
        context = _POINTER()
        self._driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context = context
        self.enter()

    def enter(self) -> None:
        self._driver("cuCtxSetCurrent", self._context)
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._main)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def pin(self, address: int, num_bytes: int) -> bool:
        return self._driver.tries("cuMemHostRegister_v2", address, num_bytes, 0) == _SUCCESS

    def unpin(self, address: int) -> None:
        self._driver("cuMemHostUnregister", address)

    def make_stream(self) -> int:
        stream = _POINTER()
        self._driver("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def end_stream(self, stream: int) -> None:
        self._driver("cuStreamDestroy_v2", stream)

    def make_event(self) -> int:
        event = _POINTER()
        self._driver("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        return event.value or 0

    def end_event(self, event: int) -> None:
        self._driver("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int | None = None) -> None:
        self._driver("cuEventRecord", event, self._main.cuda_stream if stream is None else stream)

    def hold(self, event: int, stream: int | None = None) -> None:
        self._driver("cuStreamWaitEvent", self._main.cuda_stream if stream is None else stream, event, 0)

    def finish(self, event: int) -> None:
        if self._driver.tries("cuEventQuery", event) == _NOT_READY:
            self._driver("cuEventSynchronize", event)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._driver("cuMemcpyHtoDAsync_v2", target, source, num_bytes, stream)


class _Driver:
    """libcuda.so.1, which CUDA's own libraries load too."""

    _AT_ONCE: Final[dict[str, tuple[Any, ...]]] = {
        "cuCtxSetCurrent": (_POINTER,),
        "cuStreamCreate": (_OUT, _UINT),
        "cuEventCreate": (_OUT, _UINT),
        "cuEventDestroy_v2": (_POINTER,),
        "cuEventRecord": (_POINTER, _POINTER),
        "cuEventQuery": (_POINTER,),
        "cuStreamWaitEvent": (_POINTER, _POINTER, _UINT),
        "cuMemcpyHtoDAsync_v2": (_POINTER, _POINTER, _SIZE, _POINTER),
        "cuGetErrorString": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    }
    _LONG: Final[dict[str, tuple[Any, ...]]] = {
        "cuDevicePrimaryCtxRetain": (_OUT, _INT),
        "cuMemHostRegister_v2": (_POINTER, _SIZE, _UINT),
        "cuMemHostUnregister": (_POINTER,),
        "cuStreamDestroy_v2": (_POINTER,),
        "cuEventSynchronize": (_POINTER,),
    }

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., int]] = {}
        for library, functions in ((ctypes.PyDLL(_LIBRARY), self._AT_ONCE), (ctypes.CDLL(_LIBRARY), self._LONG)):
            for name, arguments in functions.items():
                function = getattr(library, name)
                function.argtypes = arguments
                function.restype = _INT
                self._functions[name] = function

    def tries(self, name: str, *arguments: Any) -> int:
        """What a function returns."""
        return self._functions[name](*arguments)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Raises PagemillError where a function fails."""
        status = self._functions[name](*arguments)
        if status != _SUCCESS:
            text = ctypes.c_char_p()
            self._functions["cuGetErrorString"](status, ctypes.byref(text))
            why = (text.value or b"unknown error").decode(errors="replace")
            raise PagemillError(f"the GPU's driver failed in {name} with {status}: {why}")


@cache
def _driver() -> _Driver:
    return _Driver()
