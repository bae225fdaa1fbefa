"""`MemoryBudget`: what a device's memory is spent on before the KV cache gets the rest; `MemoryWatch` reads it.

Knows no steps: whoever runs the largest ones says when to look.
"""

from dataclasses import dataclass

from pagemill.errors import ConfigError
from pagemill.platforms.interface import DeviceMemory

GIB = 2**30
GRAPH_BYTES = 8 * 2**20
"""What the driver keeps for one captured graph of a few hundred kernels."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes. All but `total` and `share` are of this process."""

    total: int
    """Of the device."""
    share: float
    """Of `total`, that may be used."""
    weights: int
    steps: int
    """Most that steps hold at once, in addition to the weights: buffers that stay, and what comes and goes."""
    outside: int
    """What the driver and libraries hold, which torch does not count."""
    graphs: int
    """Estimate: captured graphs, and the memory they share."""

    @property
    def allowed(self) -> int:
        """`share` of `total`."""
        return int(self.total * self.share)

    @property
    def spent(self) -> int:
        """On everything but the KV cache."""
        return self.weights + self.steps + self.outside + self.graphs

    @property
    def kv_cache(self) -> int:
        """The rest. Raises ConfigError when there is none."""
        rest = self.allowed - self.spent
        if rest <= 0:
            raise ConfigError(
                f"gpu_memory_utilization={self.share} allows {_gib(self.allowed)} of {_gib(self.total)} GiB, and "
                f"{_gib(self.spent)} are needed before there is any KV cache ({self.line()}); raise "
                "--gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
            )
        return rest

    def line(self) -> str:
        """The parts, in GiB."""
        parts = {
            "weights": self.weights,
            "steps": self.steps,
            "outside torch": self.outside,
            "graphs": self.graphs,
        }
        return ", ".join(f"{name} {_gib(part)}" for name, part in parts.items())

    def table(self) -> str:
        """Every part on a line of its own, in GiB."""
        rows = [
            ("device", self.total),
            (f"allowed ({self.share:g} of it)", self.allowed),
            ("  weights", self.weights),
            ("  steps, at their largest", self.steps),
            ("  outside torch", self.outside),
            ("  graphs (estimate)", self.graphs),
            ("  KV cache", self.kv_cache),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(["GPU memory, GiB:", *(f"  {name:<{width}}  {_gib(part):>7}" for name, part in rows)])


@dataclass(slots=True)
class MemoryWatch:
    """Reads a device at the right moments."""

    memory: DeviceMemory
    weights: int = 0

    def loaded(self) -> None:
        """The weights are there, and nothing else."""
        self.memory.restart_peak()
        self.weights = self.memory.allocated()

    def budget(self, share: float, *, num_graphs: int, kv_cache: int) -> MemoryBudget:
        """After the worst steps were run, on a cache of `kv_cache` bytes, which are not counted. Graphs share memory,
        and none needs more than the largest step."""
        memory = self.memory
        total = memory.total()
        steps = max(0, memory.peak() - kv_cache - self.weights)
        outside = max(0, total - memory.free() - memory.reserved() - memory.others())
        return MemoryBudget(
            total=total,
            share=share,
            weights=self.weights,
            steps=steps,
            outside=outside,
            graphs=num_graphs * GRAPH_BYTES + (memory.reserved() - memory.allocated() if num_graphs else 0),
        )

    def check_room(self, share: float) -> None:
        """Raises ConfigError when others have taken what this process is allowed to use."""
        total = self.memory.total()
        free = total - self.memory.others()
        if total * share > free:
            raise ConfigError(
                f"gpu_memory_utilization={share} asks for {_gib(int(total * share))} GiB, and {_gib(free)} of "
                f"{_gib(total)} GiB are free: other processes use the rest; use --gpu-memory-utilization "
                f"{int(free / total * 100) / 100} or less"
            )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
