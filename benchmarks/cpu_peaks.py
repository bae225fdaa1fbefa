"""What this machine can do at most, measured: operations a second from registers, bytes a second from each level.

The ceilings of benchmarks/cpu_roofline.py. Knows no kernel of pagemill.
"""

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pagemill import envs

SOURCE = Path(__file__).with_name("cpu_peaks.cpp")
ROUNDS = 2_000_000
REPETITIONS = 5
KIB, MIB = 1 << 10, 1 << 20
LEVELS = {"L2": 256 * KIB, "L3": 6 * MIB, "memory": 256 * MIB}
"""Bytes that each thread reads over and over; a working set belongs to the first level that holds it."""
BYTES_READ = 2 << 30


@dataclass
class Peaks:
    """The best that was seen; measuring again can only raise it."""

    bytes_per_s: dict[str, float] = field(default_factory=dict)
    """Level -> rate of all threads together."""
    ops_per_s: dict[str, float] = field(default_factory=dict)
    """float32, bfloat16, int8 -> operations, two for a multiply-add. What the CPU lacks has the rate of float32."""

    def read_seconds(self, num_bytes: float, level: str) -> float:
        """The least time that reading takes."""
        return num_bytes / self.bytes_per_s[level]

    def level(self, num_bytes: float, threads: int) -> str:
        """Where a working set of this size lies when it is used again and again."""
        return next((name for name, size in LEVELS.items() if num_bytes <= size * threads * 1.5), "memory")


class PeakMeter:
    """Measures on one thread per core."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory()
        self._library = ctypes.CDLL(str(self._compile(Path(self._folder.name))))
        self._data = torch.ones(threads, LEVELS["memory"] // 4)
        self._pool = ThreadPoolExecutor(threads)

    def measure(self, peaks: Peaks) -> None:
        """Raise `peaks` to what is reached now."""
        for name in ("float32", "bfloat16", "int8"):
            function = self._function(f"peak_{name}", ctypes.c_int64)
            rate = self._best(lambda _, out, f=function: f(ROUNDS, out))
            peaks.ops_per_s[name] = max(rate or peaks.ops_per_s["float32"], peaks.ops_per_s.get(name, 0.0))
        read = self._function("read_memory", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        for name, size in LEVELS.items():
            repeats = max(1, BYTES_READ // size // self._threads)
            rate = self._best(
                lambda thread, out, s=size, r=repeats: read(self._data[thread].data_ptr(), s // 64, r, out)
            )
            peaks.bytes_per_s[name] = max(rate, peaks.bytes_per_s.get(name, 0.0))

    def _best(self, run: Callable[[int, ctypes.Array[ctypes.c_float]], float]) -> float:
        rates = []
        for _ in range(REPETITIONS):
            outs = [(ctypes.c_float * 16)() for _ in range(self._threads)]
            began = time.perf_counter()
            done = sum(self._pool.map(run, range(self._threads), outs))
            rates.append(done / (time.perf_counter() - began))
        return max(rates)

    def _function(self, name: str, *arguments: type) -> Callable[..., float]:
        found = getattr(self._library, name)
        found.argtypes, found.restype = (*arguments, ctypes.c_float * 16), ctypes.c_double
        return found

    def _compile(self, folder: Path) -> Path:
        compiler = shutil.which(envs.compiler())
        if compiler is None:
            raise SystemExit(f"no C++ compiler ({envs.compiler()}): the ceilings cannot be measured")
        flags = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fPIC", "-shared")
        made = folder / "peaks.so"
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(made)], check=True)
        return made
