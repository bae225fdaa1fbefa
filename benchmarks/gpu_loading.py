"""How long a checkpoint takes to load to a GPU, beside pinned copies of as many bytes.

    PYTHONPATH=. python benchmarks/gpu_loading.py [--gigabytes 5] [--turns 3]

Makes the checkpoint of benchmarks/loading.py. In a fresh process for each turn, bytes go to the GPU from pinned memory,
in pieces of 8 MiB one after the other, or the model is loaded, from files in the page cache to weights that are ready
to run. Both times are the least of several turns, without what a process does once: imports, starting CUDA, loading
its first kernels. `first` is the time with the imports of the model and the first kernels.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.loading import make_checkpoint
from pagemill.artifacts.describe import describe
from pagemill.config.arguments import EngineArgs
from pagemill.launch import build_config
from pagemill.model.distributed.parallel_groups import solo_groups
from pagemill.model.factory import build_model, load_model
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


def load_s(folder: Path, *, first: bool) -> float:
    """Seconds to load the model, to when the GPU has all of it. Unless it is the `first` that the process does, a model
    without weights has been built before."""
    config = build_config(EngineArgs(str(folder), device="cuda", dtype="bfloat16", skip_tokenizer_init=True))
    platform = CudaPlatform()
    platform.start(0)
    facts = describe(str(folder), folder)
    torch.empty(1, device="cuda")
    with gc_paused():  # as an engine is while it starts
        if not first:
            with torch.device("cuda"):
                build_model(facts, config.model, platform, solo_groups())
        torch.cuda.synchronize()
        start = time.perf_counter()
        model = load_model(facts, config.model, platform, PhaseTimer())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    del model
    return seconds


def turn(folder: Path, what: str) -> float:
    """Seconds in a fresh process."""
    command = [sys.executable, __file__, "--turn", what, "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def size_of(folder: Path) -> int:
    """Bytes of the files of weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main() -> None:
    """Print one line of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn", choices=("copy", "load", "first"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.turn:
        folder = asked.folder
        seconds = copy_s(size_of(folder)) if asked.turn == "copy" else load_s(folder, first=asked.turn == "first")
        print(json.dumps(seconds))
        return
    with tempfile.TemporaryDirectory(prefix="pagemill-loading-") as scratch:
        folder = Path(scratch)
        make_checkpoint(folder, int(asked.gigabytes * 1e9))
        turn(folder, "load")  # the files are in the page cache from now on
        turns = ("copy", "load", "first")
        copied, loaded, first = (min(turn(folder, what) for _ in range(asked.turns)) for what in turns)
        size = size_of(folder) / 1e9
    print(
        f"{torch.cuda.get_device_name()}: {size:.2f} GB, pinned copies {copied:.3f} s ({size / copied:.1f} GB/s), "
        f"load {loaded:.3f} s ({size / loaded:.1f} GB/s): {copied / loaded:.2f} of the copies; first {first:.3f} s"
    )


if __name__ == "__main__":
    main()
