"""The CUDA platform. Asks the driver's management library, so that facts cost neither torch nor a CUDA context."""

import ctypes
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path

from pagemill import envs
from pagemill.catalog.attention import cuda_order
from pagemill.config.facts import DeviceFacts
from pagemill.errors import ConfigError
from pagemill.platforms.cuda_context import EarlyContext
from pagemill.platforms.interface import Copier, DeviceMemory, GraphMaker, Platform, Transfers

TOKEN_BUDGET = 8192
NUM_SEQS = 256
LARGE_NUM_SEQS = 1024
"""Of a GPU with at least LARGE_BYTES, whose memory holds the KV cache of so many requests."""
LARGE_BYTES = 70 << 30
LIBRARY_FOLDERS = ("/usr/local/nvidia/lib64/", "/usr/lib/x86_64-linux-gnu/", "/usr/lib/wsl/lib/", "")
"""Where the driver's library may be; at last, where the loader looks."""
_NAME_BYTES = 96
_MEMORY_CLOCK = 2
"""NVML_CLOCK_MEM."""


class CudaPlatform(Platform):
    """NVIDIA GPUs."""

    name = "cuda"
    runs_ahead = True

    def __init__(self) -> None:
        self._index = 0
        self._others = 0
        self._capability: tuple[int, int] | None = None
        self._early: EarlyContext | None = None
        """With `_others` as it was before."""

    def absence(self) -> str | None:
        if not _torch_has_cuda():
            return "this torch is built without CUDA"
        try:
            return None if _Management().count() else "the driver shows no GPU"
        except OSError as error:
            return f"the NVIDIA driver is not here ({error})"

    def facts(self) -> DeviceFacts:
        device = _Management().device(self._index)
        self._capability = device.capability
        return DeviceFacts(
            "cuda",
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            device.free_bytes,
            ("bfloat16", "float16", "float32") if device.capability >= (8, 0) else ("float16", "float32"),
            token_budget=TOKEN_BUDGET,
            num_seqs=LARGE_NUM_SEQS if device.free_bytes + device.used_bytes >= LARGE_BYTES else NUM_SEQS,
            runs_ahead=True,
            captures=True,
            title=device.title,
            capability=device.capability,
            memory_bytes_per_s=device.memory_bytes_per_s,
            deterministic=envs.batch_invariant(),
        )

    def prepare(self, local_rank: int) -> None:
        if "torch" in sys.modules and _has_context():
            return
        try:
            self._others = _Management().device(local_rank).used_bytes
        except OSError:
            return
        self._early = EarlyContext(local_rank)

    def start(self, local_rank: int) -> None:
        import torch  # deferred: facts() must not cost the import of torch

        if self._early is not None:
            self._early.wait()
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda' cannot be used: torch finds no usable GPU; use --device cpu")
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"worker {local_rank} of this machine needs a GPU of its own, and there are "
                f"{torch.cuda.device_count()}; lower tensor_parallel_size or pipeline_parallel_size"
            )
        self._index = local_rank
        self._capability = None
        if self._early is None:
            # What this process has taken already cannot be told from what others have, and is counted as its own.
            self._others = 0 if _has_context() else _Management().device(local_rank).used_bytes
        torch.cuda.set_device(local_rank)

    def set_threads(self, num_threads: int, cpus: tuple[int, ...] = ()) -> None:
        """Threads of the CPU do no work that would gain by them."""

    def attention_order(self) -> tuple[str, ...]:
        capability = self._capability or _Management().device(self._index).capability
        self._capability = capability
        return (*cuda_order(capability), *cuda_order(capability, mla=True), "TORCH_MLA", "TORCH_SDPA")

    def dist_backend(self) -> str:
        return "nccl"

    def torch_device(self) -> str:
        return "cuda"

    def memory(self) -> DeviceMemory:
        from pagemill.platforms.cuda_queue import CudaMemory  # deferred: torch

        return CudaMemory(self._others)

    def transfers(self) -> Transfers:
        from pagemill.platforms.cuda_queue import CudaTransfers  # deferred: torch

        return CudaTransfers()

    def copier(self) -> Copier | None:
        from pagemill.platforms.cuda_copier import CudaCopier  # deferred: torch

        try:
            return CudaCopier()
        except OSError:  # the driver's library, under another name
            return None

    def graph_maker(self) -> GraphMaker:
        from pagemill.platforms.cuda_graphs import CudaGraphMaker  # deferred: torch

        return CudaGraphMaker()


class _Device:
    """What the driver says about one GPU."""

    def __init__(self, title: str, memory: "_Memory", capability: tuple[int, int], memory_bytes_per_s: float) -> None:
        self.title = title
        self.memory_bytes_per_s = memory_bytes_per_s
        self.capability = capability
        self.free_bytes = memory.free
        self.used_bytes = memory.total - memory.free


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64))


class _Management:
    """libnvidia-ml. Raises OSError when it is not there, or refuses."""

    def __init__(self) -> None:
        self._library = _load()
        self._call("nvmlInit_v2")

    def count(self) -> int:
        """GPUs that this process may use."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        shown = envs.shown_cuda_devices()
        return count.value if shown is None else min(count.value, len(shown))

    def device(self, index: int) -> _Device:
        """The one that this process calls number `index`."""
        shown = envs.shown_cuda_devices() or []
        number = int(shown[index]) if index < len(shown) and shown[index].isdigit() else index
        handle = ctypes.c_void_p()
        memory = _Memory()
        title = ctypes.create_string_buffer(_NAME_BYTES)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(handle))
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        self._call("nvmlDeviceGetName", handle, title, ctypes.c_uint(_NAME_BYTES))
        self._call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        capability = (major.value, minor.value)
        return _Device(title.value.decode(errors="replace"), memory, capability, self._memory_bytes_per_s(handle))

    def _memory_bytes_per_s(self, handle: ctypes.c_void_p) -> float:
        """Width times the highest clock, with two transfers in each; 0 where the driver does not say."""
        bits = ctypes.c_uint()
        megahertz = ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMemoryBusWidth", handle, ctypes.byref(bits))
            self._call("nvmlDeviceGetMaxClockInfo", handle, ctypes.c_uint(_MEMORY_CLOCK), ctypes.byref(megahertz))
        except (OSError, AttributeError):  # a driver of long ago, or a part of a GPU
            return 0.0
        return bits.value / 8 * megahertz.value * 1e6 * 2

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise OSError(f"{name} failed with status {status}")


def _has_context() -> bool:
    import torch  # deferred: facts() must not cost the import of torch

    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized


def _load() -> ctypes.CDLL:
    for folder in LIBRARY_FOLDERS:
        try:
            return ctypes.CDLL(f"{folder}libnvidia-ml.so.1")
        except OSError as error:
            missing = error
    raise missing


@cache
def _torch_has_cuda() -> bool:
    """Whether torch is built for CUDA, read from its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.exists() and re.search(r"^cuda\b[^=]*=\s*['\"]", version.read_text(), re.MULTILINE) is not None
