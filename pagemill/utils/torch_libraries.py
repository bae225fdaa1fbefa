"""What makes importing torch faster: `load_torch_library`, its largest shared library, loaded before torch is imported
and without the interpreter's lock; `source_only`, whether its bytecode is missing.

Loading the library takes a good part of what importing torch does, and none of that is Python: addresses are filled in,
and some thousand operators register themselves. An import holds the lock all that time; this gives it
up, so that other threads get on with what is to be done at start.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

_LIBRARY = "libtorch_cpu.so"
_OF_GPU_BUILDS = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


def load_torch_library() -> bool:
    """Whether it did. It does nothing where torch has been imported or is not there, on systems other than Linux, and
    for builds for GPUs, which look for the libraries that they need in an order of their own: `import torch` then loads
    everything, as ever."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return False
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent / "lib"
    if any((folder / name).exists() for name in _OF_GPU_BUILDS):
        return False
    # A foreign function gives up the lock while it runs; ctypes.CDLL does not while it loads.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    dlopen.restype = ctypes.c_void_p
    return dlopen(os.fsencode(folder / _LIBRARY), os.RTLD_NOW) is not None


def source_only() -> Path | None:
    """Where torch is installed, if none of its bytecode is kept, so that each import compiles a thousand files again;
    asked when it has been imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return None
    return Path(spec.origin).parent.parent
