"""How long a checkpoint takes to load on the CPU, beside a copy of its bytes in memory, and what it holds meanwhile.

Makes a checkpoint of random numbers of about the given size in one of a few formats (Llama's shapes), and in a fresh
process for each turn copies the files' bytes, or loads the model. Both times are the least of several turns; anonymous
memory is the highest that was seen, beside what the process had before. Knows no engine: `pagemill.model.factory`
loads.

The copy is numpy's, on one thread: files in the page cache, mapped, into new memory in huge pages, all of which is kept
to the end. The load is `load_model`, from the mapped files to a model ready to run: layers are built, tensors read,
checked and packed, on all threads. Neither time has what the process does before: imports, and loading the kernels'
library. A hypervisor takes memory that has been free for some seconds, and giving it again takes twenty times as
long as clearing it: so, before either, each process touches as much memory as it will need, and frees it.
"""

import argparse
import json
import mmap
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.loading_formats import FORMATS, make_checkpoint
from pagemill.artifacts.describe import describe
from pagemill.config.arguments import EngineArgs
from pagemill.launch import build_config
from pagemill.model.factory import load_model
from pagemill.model.kernels.native import library
from pagemill.model.kernels.weight_memory import WeightMemory
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer

POLL_S = 0.002


class AnonymousMemory:
    """The highest anonymous memory of this process, looked at every POLL_S seconds by a thread."""

    def __init__(self) -> None:
        self.before = self.highest = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self.highest = max(self.highest, anonymous_bytes())

    def end(self) -> int:
        """Bytes above what there was at first."""
        self._ended.set()
        self._thread.join()
        return max(self.highest, anonymous_bytes()) - self.before


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("the system tells no RssAnon")


def copy_s(folder: Path) -> float:
    """Seconds to copy all bytes of the mapped files into new memory, as a plain copy does."""
    files = [np.memmap(path, dtype=np.uint8, mode="r") for path in weight_files(folder)]
    touch_memory(folder)
    start = time.perf_counter()
    copies = [np.array(mapped) for mapped in files]
    seconds = time.perf_counter() - start
    del copies
    return seconds


def weight_files(folder: Path) -> list[Path]:
    """The files that hold weights."""
    return [*sorted(folder.glob("*.safetensors")), *folder.glob("*.gguf")]


def size_of(folder: Path) -> int:
    """Bytes of the files of weights."""
    return sum(path.stat().st_size for path in weight_files(folder))


def touch_memory(folder: Path) -> None:
    """Have as much memory as the files have bytes, and a little more, and give it back."""
    num_bytes = int(size_of(folder) * 1.05)
    pages = WeightMemory().empty(num_bytes, dtype=torch.uint8)
    pages[:: mmap.PAGESIZE] = 1


def measure(folder: Path, what: str) -> dict[str, float]:
    """One turn, in this process: a copy, or a load with its memory."""
    if what == "copy":
        return {"seconds": copy_s(folder)}
    path = next(folder.glob("*.gguf"), folder)
    config = build_config(EngineArgs(str(path), device="cpu", dtype="bfloat16", skip_tokenizer_init=True))
    platform = CpuPlatform()
    platform.start(0)
    facts = describe(str(path), path)
    library()
    touch_memory(folder)
    memory = AnonymousMemory() if what == "memory" else None
    start = time.perf_counter()
    model = load_model(facts, config.model, platform, PhaseTimer())
    seconds = time.perf_counter() - start
    peak = 0 if memory is None else memory.end()
    del model
    return {"seconds": seconds, "peak": peak}


def turn(folder: Path, what: str) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--turn", what, "--folder", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str]) -> int:
    """Print one line of results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept (default: made and removed)")
    parser.add_argument("--turn", choices=("copy", "load", "memory"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.turn:
        print(json.dumps(measure(asked.folder, asked.turn)))
        return 0
    with tempfile.TemporaryDirectory(prefix="pagemill-loading-") as scratch:
        folder = asked.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not weight_files(folder):
            make_checkpoint(folder, int(asked.gigabytes * 1e9), asked.format)
        size = size_of(folder)
        turn(folder, "copy")  # the files are in the page cache from now on
        found = [(turn(folder, "copy")["seconds"], turn(folder, "load")["seconds"]) for _ in range(asked.turns)]
        copied, loaded = (min(times) for times in zip(*found, strict=True))
        peak = turn(folder, "memory")["peak"]
    print(
        f"{asked.format}, {size / 1e9:.2f} GB: copy {copied:.2f} s, load {loaded:.2f} s ({loaded / copied:.2f} times), "
        f"anonymous memory {peak / 1e9:.2f} GB at most ({peak / size:.2f} of the file)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
