"""The CPU platform. Reads the machine from /proc and /sys; torch is imported only where threads are set."""

from pathlib import Path

from pagemill import envs
from pagemill.config.facts import DeviceFacts
from pagemill.log import get_logger
from pagemill.platforms.cpu_topology import read_topology
from pagemill.platforms.interface import Platform
from pagemill.platforms.thread_binding import ThreadBinding
from pagemill.utils.cpu_list import format_cpu_list

logger = get_logger(__name__)

PREFILL_TOKENS = 320
"""More rows for a thread gain little speed, but all prompts of a step wait for the last of them (docs/scheduler.md)."""


class CpuPlatform(Platform):
    """Any CPU that torch supports."""

    name = "cpu"
    _binding: ThreadBinding | None = None

    def facts(self) -> DeviceFacts:
        quantized = "bfloat16" if envs.native_kernels() and "avx2" in _flags() else None
        topology = read_topology()
        return DeviceFacts(
            "cpu",
            topology.num_threads,
            _free_bytes(),
            _fast_dtypes(),
            quantized,
            prefill_tokens=PREFILL_TOKENS,
            topology=topology,
            threads_bind=envs.cpu_threads_bind(),
            deterministic=envs.batch_invariant(),
            drafts_pay=quantized is not None and "avx512_vnni" in _flags(),
        )

    def set_threads(self, num_threads: int, cpus: tuple[int, ...] = ()) -> None:
        import torch  # deferred: facts() must not cost the import of torch

        self.release_threads()
        topology = read_topology()
        nodes = topology.nodes_of(cpus or topology.nodes)
        if cpus:
            num_threads = min(num_threads, len(cpus))
            self._binding = ThreadBinding(cpus, nodes)
        torch.set_num_threads(num_threads)
        logger.info(
            "computes with %d thread%s %s CPU%s %s, NUMA node%s %s",
            num_threads,
            "s" * (num_threads > 1),
            "bound to" if cpus else "on any of",
            "s" * (len(cpus or topology.nodes) > 1),
            format_cpu_list(cpus or topology.nodes),
            "s" * (len(nodes) > 1),
            format_cpu_list(nodes),
        )

    def release_threads(self) -> None:
        if self._binding is not None:
            self._binding.release()
            self._binding = None

    def attention_order(self) -> tuple[str, ...]:
        return ("CPU_ATTN", "CPU_ENCODER", "CPU_MLA", "TORCH_CPU", "TORCH_MLA", "TORCH_SDPA")

    def dist_backend(self) -> str:
        return "gloo"

    def torch_device(self) -> str:
        return "cpu"


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
