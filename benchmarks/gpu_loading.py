"""How long a checkpoint takes to load to a GPU, beside pinned copies of as many bytes.

    PYTHONPATH=. python benchmarks/gpu_loading.py [--gigabytes 5] [--turns 3] [--processes 2]

Makes a checkpoint of bfloat16 numbers (benchmarks/loading_formats.py). Each of a few fresh processes loads the model
once, from files in the page cache to weights that are ready to run; then, by turns, it sends as many bytes from pinned
memory to the GPU, in pieces of 8 MiB one after the other, and loads the model again. What is compared are the least of
these: without what a process does once, which is imports, starting CUDA, loading its first kernels and pinning buffers,
and into memory that PyTorch has already. `first` is the least of the processes' first loads, with the imports of the
model, the first kernels and the pinning.

A process takes some seconds before its first load, on a machine whose files are not in memory many: what has been done
by when is told on stderr.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.loading_formats import make_checkpoint
from pagemill.artifacts.describe import describe
from pagemill.config.arguments import EngineArgs
from pagemill.launch import build_config
from pagemill.model.factory import load_model
from pagemill.platforms.cuda import CudaPlatform
from pagemill.utils.gc_pause import gc_paused
from pagemill.utils.timing import PhaseTimer

PIECE_BYTES = 8 << 20


def copy_s(num_bytes: int) -> float:
    """Seconds to send so many bytes from pinned memory."""
    pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    made = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for begin in range(0, num_bytes, PIECE_BYTES):
        part = made[begin : begin + PIECE_BYTES]
        part.copy_(pinned[: len(part)], non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def process(folder: Path, turns: int) -> dict[str, float]:
    """Seconds of a process's first load, and the least of its copies and of its other loads."""
    config = build_config(EngineArgs(str(folder), device="cuda", dtype="bfloat16", skip_tokenizer_init=True))
    platform = CudaPlatform()
    platform.start(0)
    facts = describe(str(folder), folder)
    size = size_of(folder)
    torch.empty(1, device="cuda")

    def load_s() -> float:
        """To when the GPU has all of it."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        model = load_model(facts, config.model, platform, PhaseTimer())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        del model
        gc.collect()  # what refers to itself would keep its weights
        return seconds

    with gc_paused():  # as an engine is while it starts
        first = load_s()
        pairs = [(copy_s(size), load_s()) for _ in range(turns)]
    copied, loaded = map(min, zip(*pairs, strict=True))
    return {"first": first, "copied": copied, "loaded": loaded}


def fresh_process(folder: Path, turns: int) -> dict[str, float]:
    """What `process` finds in one."""
    command = [sys.executable, __file__, "--folder", str(folder), "--turns", str(turns)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def size_of(folder: Path) -> int:
    """Bytes of the files of weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main() -> None:
    """Print one line of results."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=3, help="copies, and loads, of a process")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder:
        print(json.dumps(process(asked.folder, asked.turns)))
        return
    found = []
    with tempfile.TemporaryDirectory(prefix="pagemill-loading-") as scratch:
        folder = Path(scratch)
        make_checkpoint(folder, int(asked.gigabytes * 1e9))
        size = size_of(folder) / 1e9
        print(f"{time.perf_counter() - began:.1f} s: the checkpoint is made", file=sys.stderr)
        for _ in range(asked.processes):
            found.append(fresh_process(folder, asked.turns))
            print(f"{time.perf_counter() - began:.1f} s: {found[-1]}", file=sys.stderr)
    copied, loaded, first = (min(one[name] for one in found) for name in ("copied", "loaded", "first"))
    print(
        f"{torch.cuda.get_device_name()}: {size:.2f} GB, pinned copies {copied:.3f} s ({size / copied:.1f} GB/s), "
        f"load {loaded:.3f} s ({size / loaded:.1f} GB/s): {copied / loaded:.2f} of the copies; first {first:.3f} s"
    )


if __name__ == "__main__":
    main()
