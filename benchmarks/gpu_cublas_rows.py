"""Which of cuBLAS's tiles are fastest for some tens to hundreds of rows of 8-bit floats, beside what torch calls and
what the model calls (pagemill/model/kernels/fp8_tiles.py).

    python -m benchmarks.gpu_cublas_rows [--only fp8-rows,fp8-blocks] [--rows 64,256] [--table FILE]

The table has the times of all candidates, a JSON object a line. `torch 32 MiB`: torch, of blocks, in a
process that was told of a larger workspace (CUBLASLT_WORKSPACE_SIZE). Needs a Hopper GPU and CUDA 12.9; 60 s.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import gpu_cublas
from benchmarks.cublas_lt import SearchedLt
from benchmarks.gpu_cublas import LARGEST_ERROR, WORKSPACE_BYTES, Call, Case, Search, by_turns, graph_of, shown
from pagemill.model.kernels import fp8_tiles
from pagemill.model.kernels.cublas_lt import Algo, CublasError, Kind
from pagemill.model.kernels.eight_bits import BLOCK, EightBits
from pagemill.model.kernels.triton import eight_bits_rows, fp8_rows, launch
from pagemill.model.kernels.triton.eight_bits_choices import few_choice
from pagemill.model.kernels.triton.fp8_choices import MAX_FEW_ROWS, few_rows_choice

ROWS = (40, 64, 128, 192, 256, 384, 512)
QWEN3_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
OTHERS = {
    "8b-gate_up": (28672, 4096), "8b-down": (4096, 14336),
    "1b-qkv": (3072, 2048), "1b-o": (2048, 2048), "1b-gate_up": (16384, 2048), "1b-down": (2048, 8192),
}  # fmt: skip
"""Of Llama 3."""
SHAPES = {"fp8-rows": QWEN3_8B | OTHERS, "fp8-blocks": QWEN3_8B}
TILES = {
    (64, 32): 13, (64, 64): 15, (64, 96): 26, (64, 128): 17, (64, 192): 116, (64, 256): 19, (96, 128): 28,
    (128, 32): 16, (128, 48): 397, (128, 64): 18, (128, 96): 33, (128, 128): 20, (128, 192): 32, (160, 128): 30,
    (192, 64): 208, (192, 128): 31, (256, 64): 21, (256, 128): 24,
}  # fmt: skip
"""cublasLtMatmulTile_t of outputs x rows."""
PROCESSORS = 132
LARGER_WORKSPACE = {"CUBLASLT_WORKSPACE_SIZE": "32768"}


def num_tiles(tile: tuple[int, int], outputs: int, rows: int) -> int:
    return -(-outputs // tile[0]) * -(-rows // tile[1])


class RowsSearch(Search):
    """Tiles of our choice instead of all neighbours."""

    def run(self, seconds: float) -> list[Algo]:
        """The heuristic's first, and the best."""
        until = time.perf_counter() + seconds
        case = self.case
        first = case.product.offered()[0]
        self.quick(first)
        for tile, number in TILES.items():
            if tile[1] >= max(65, 2 * case.num_rows):
                continue
            splits = [
                split for split in (2, 4) if num_tiles(tile, case.outputs, case.num_rows) * split < 2 * PROCESSORS
            ]
            customs = sorted({0, 1, self.library.read(first).custom})
            changes = [{"cluster": cluster, "custom": custom} for cluster in (4, 3, 2) for custom in customs]
            changes += [{"cluster": 3, "split": split, "reduction": 2} for split in splits]
            for change in changes:
                other = self.library.changed(first, tile=number, **{"split": 1, "reduction": 0} | change)
                if other is not None:
                    self.quick(other)
        for algo in self.best(2):
            for other in self.library.neighbours(algo):
                if time.perf_counter() > until:
                    break
                self.quick(other)
        right = [algo for algo in self.best(8) if case.is_right(case.call(algo, self.workspace))]
        return [first, *right[:3]]


def captured_is_right(case: Case, call: Call) -> bool:
    """Whether it gives what torch gives from a captured graph, too."""
    graph = graph_of([lambda: call(0)])

    def replay(_: int) -> None:
        graph.replay()

    return case.is_right(replay)


def ours(case: Case) -> Call:
    """What the model calls."""

    def run(copy: int) -> torch.Tensor:
        weight = case.weights[copy % len(case.weights)]
        result = fp8_tiles.multiply(Kind(case.kind), (case.x, case.factors), (weight, case.scales))
        return case.torch_call(copy) if result is None else result

    return run


def few(case: Case) -> Call:
    """Rows as they are times a weight that is read in 8 bits."""
    x = torch.randn(case.num_rows, case.size, device="cuda").bfloat16()
    if case.kind == "fp8-rows":
        tiles = few_rows_choice(case.outputs, case.size)
        return lambda copy: fp8_rows.few_rows(x, case.weights[copy % len(case.weights)], case.scales, None, None, tiles)
    few_tiles = few_choice(case.num_rows, (case.outputs, case.size, False))

    def run(copy: int) -> object:
        weight = EightBits(case.weights[copy % len(case.weights)], case.scales, BLOCK, BLOCK)
        return eight_bits_rows.few_rows(x, weight, few_tiles)

    return run


def measure(library: SearchedLt, case: Case, workspace: torch.Tensor, seconds: float) -> dict:
    """Print a product's line; all that was found."""
    search = RowsSearch(library, case, workspace)
    algos = search.run(seconds)
    calls = [case.torch_call, ours(case), *(case.call(algo, workspace) for algo in algos)]
    case.out.copy_(calls[1](0))
    right = case.error() < LARGEST_ERROR and captured_is_right(case, calls[-1])
    times = by_turns(case, calls)
    unquantized = float("nan")
    if case.num_rows <= MAX_FEW_ROWS:
        as_they_are = few(case)
        as_they_are(0)  # compiled before it is captured
        unquantized = by_turns(case, [as_they_are])[0]
    best = min(range(1, len(calls)), key=lambda place: times[place])
    configs = [library.read(algo) for algo in algos]
    tile = fp8_tiles.choose(Kind(case.kind), case.outputs, case.num_rows, PROCESSORS)
    print(
        f"{case.kind} x{case.num_rows} {case.name}: few {unquantized:.1f}, torch {times[0]:.1f}, "
        f"ours {times[1]:.1f} {tile}, first {times[2]:.1f} {shown(configs[0])}, best {times[best]:.1f} "
        f"{shown(configs[best - 2]) if best > 1 else 'ours'}; torch/ours {times[0] / times[1]:.2f}, ours/best "
        f"{times[1] / times[best]:.2f}{'' if right else ' WRONG'}",
        flush=True,
    )
    found = sorted((us, config) for config, (us, _) in search.seen.items() if us < float("inf"))
    return {
        "kind": case.kind, "rows": case.num_rows, "name": case.name, "outputs": case.outputs, "inputs": case.size,
        "few_us": unquantized, "torch_us": times[0], "ours_us": times[1], "first_us": times[2], "best_us": times[best],
        "first": configs[0],
        "all": [[round(us, 2), config.tile, config.split, config.cluster, config.custom] for us, config in found],
    }  # fmt: skip


def run_kind(kind: str, rows: tuple[int, ...], seconds: float, table: Path | None) -> None:
    """Every number of rows and shape, in this process; without seconds what torch calls alone."""
    library = SearchedLt()
    launch.set_dependent(True)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    torch.manual_seed(0)
    gpu_cublas.SHAPES, gpu_cublas.SLICE_MS = SHAPES[kind], 8.0
    print(
        f"{kind}: {torch.cuda.get_device_name()}, torch {torch.__version__}, cuBLASLt {library.version()}", flush=True
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        for num_rows in rows:
            sums = [0.0] * 5
            for name in SHAPES[kind]:
                case = Case(library, kind, name, num_rows)
                if not seconds:
                    print(
                        f"{kind} x{num_rows} {name}: torch 32 MiB {by_turns(case, [case.torch_call])[0]:.1f}",
                        flush=True,
                    )
                    continue
                with contextlib.suppress(CublasError):
                    found = measure(library, case, workspace, seconds)
                    if name in QWEN3_8B:
                        times = (found[f"{which}_us"] for which in ("few", "torch", "ours", "first", "best"))
                        sums = [total + us for total, us in zip(sums, times, strict=True)]
                    if table is not None:
                        with table.open("a") as file:
                            file.write(json.dumps(found) + "\n")
            if seconds:
                shown_sums = ", ".join(f"{us:.1f}" for us in sums)
                print(
                    f"{kind} x{num_rows}, a layer of Qwen3-8B: few, torch, ours, first, best {shown_sums}", flush=True
                )


def main() -> None:
    """Run every kind in a process, which starts while the one before measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SHAPES), help="kinds of numbers")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=0.3, help="of search for each product")
    parser.add_argument("--table", type=Path, help="where all times go")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        torch.zeros(1, device="cuda")
        sys.stdin.readline()
        run_kind(asked.child, tuple(map(int, asked.rows.split(","))), asked.seconds, asked.table)
        return
    command = [sys.executable, "-m", "benchmarks.gpu_cublas_rows", "--rows", asked.rows]
    table = [] if asked.table is None else ["--table", str(asked.table)]
    kinds = asked.only.split(",")
    children = [
        subprocess.Popen(
            [*command, *table, "--seconds", str(asked.seconds), "--child", kind], stdin=subprocess.PIPE, text=True
        )
        for kind in kinds
    ]
    children += [
        subprocess.Popen(
            [*command, "--seconds", "0", "--child", kind],
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | LARGER_WORKSPACE,
        )
        for kind in kinds
        if kind == "fp8-blocks"
    ]
    sys.exit(gpu_cublas.num_failed(children))


if __name__ == "__main__":
    main()
