"""The CPU platform. Reads the machine from /proc and /sys; torch is imported only where threads are set."""

import os
from pathlib import Path

from pagemill import envs
from pagemill.config.facts import DeviceFacts
from pagemill.platforms.interface import Platform


class CpuPlatform(Platform):
    """Any CPU that torch supports."""

    name = "cpu"

    def facts(self) -> DeviceFacts:
        quantized = "bfloat16" if envs.native_kernels() and "avx2" in _flags() else None
        return DeviceFacts("cpu", _physical_cores(), _free_bytes(), _fast_dtypes(), quantized)

    def set_threads(self, num_threads: int) -> None:
        import torch  # deferred: facts() must not cost the import of torch

        torch.set_num_threads(num_threads)

    def attention_order(self) -> tuple[str, ...]:
        return ("CPU_ATTN", "TORCH_CPU", "TORCH_MLA")

    def dist_backend(self) -> str:
        return "gloo"

    def torch_device(self) -> str:
        return "cpu"


def _physical_cores() -> int:
    """Cores this process may run on, counting the threads of one core once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, len(cores))


def _free_bytes() -> int:
    """Memory that can be had without swapping, bounded by the control group's limit."""
    import psutil  # deferred: only start-up asks

    free = int(psutil.virtual_memory().available)
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            free = min(free, int(text))
    return free


def _fast_dtypes() -> tuple[str, ...]:
    """bfloat16 pays only where the CPU multiplies it in hardware."""
    fast = any(flag in _flags() for flag in ("avx512_bf16", "amx_bf16", " bf16"))
    return ("bfloat16", "float32") if fast else ("float32",)


def _flags() -> str:
    """What the CPU can, as Linux says it."""
    info = Path("/proc/cpuinfo")
    return info.read_text(errors="replace") if info.exists() else ""
