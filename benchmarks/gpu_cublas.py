"""Whether cuBLAS has faster algorithms for the linear layers of an 8B model than the one that its heuristic puts first.

    python -m benchmarks.gpu_cublas [--only bf16,fp8-rows,fp8-blocks] [--rows 512,2048] [--seconds 0.8]

For each product: what torch calls, the heuristic's first, and the best of its candidates and of what differs from those
in one setting (tile, stages, cluster, split, swizzle), each checked against torch's result, with weights in turns that
no cache holds. Then a whole layer of torch's calls and of the best, by turns and long enough for the GPU's power limit.
Each kind of number is a process of its own, one at a time. Needs a Hopper GPU and CUDA 12.9; 90 s.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.cublas_lt import Config, SearchedLt
from pagemill.model.kernels import eight_bits, fp8
from pagemill.model.kernels.cublas_lt import Algo, CublasError, Kind, Product
from pagemill.model.kernels.triton import gated_prompts, launch
from pagemill.model.kernels.triton.gated import gated
from pagemill.model.quantization import fp8_blocks

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
ROWS = {"bf16": (2048, 8192, 512), "fp8-rows": (256, 8192), "fp8-blocks": (256, 8192)}
WORKSPACE_BYTES = 64 << 20
MAX_RESULTS = 64
"""Algorithms that are asked for."""
COLD_BYTES = 160 << 20
FINALISTS = 5
SLICE_MS = 30.0
"""Of one candidate in its turn."""
LAYER_SECONDS = 0.5
LARGEST_ERROR = 0.02
"""Of the largest output."""

Call = Callable[[int], object]
"""The product with one of the copies of its weight."""


class Case:
    """One product: kind, number of rows, and copies of its weight."""

    def __init__(self, library: SearchedLt, kind: str, name: str, num_rows: int) -> None:
        self.kind, self.name, self.num_rows = kind, name, num_rows
        self.outputs, self.size = SHAPES[name]
        x = torch.randn(num_rows, self.size, device="cuda")
        plain = torch.randn(self.outputs, self.size, device="cuda") / self.size**0.5
        self.factors = self.scales = torch.empty(0)
        if kind == "bf16":
            self.x, weight = x.bfloat16(), plain.bfloat16()
        elif kind == "fp8-rows":
            self.x, self.factors = fp8.quantize(x.bfloat16())
            weight, self.scales = fp8.quantize(plain.bfloat16())
        else:
            self.x, self.factors = eight_bits.reference_quantize(x, eight_bits.BLOCK, fp8.FP8)
            self.factors = self.factors.contiguous()
            held = fp8_blocks.quantize(plain)
            made = eight_bits.blocks_of_floats(held.values, held.scales)
            weight, self.scales = made.values, made.scales
        copies = max(2, -(-COLD_BYTES // (weight.numel() * weight.itemsize)))
        self.weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        self.out = torch.empty(num_rows, self.outputs, dtype=torch.bfloat16, device="cuda")
        self.product = Product(library, Kind(kind), (num_rows, self.outputs, self.size), WORKSPACE_BYTES)
        if kind != "bf16":
            self.product.set_scales(self.scales.data_ptr(), self.factors.data_ptr())
        self.wanted = self.torch_call(0)

    def torch_call(self, copy: int) -> Tensor:
        """What the model calls."""
        weight = self.weights[copy % len(self.weights)]
        if self.kind == "bf16":
            return functional.linear(self.x, weight)
        rows = self.kind == "fp8-rows"
        result: Tensor = torch._scaled_mm(
            self.x,
            weight.t(),
            scale_a=self.factors.unsqueeze(1) if rows else self.factors.t(),
            scale_b=self.scales.unsqueeze(0) if rows else self.scales,
            out_dtype=torch.bfloat16,
            use_fast_accum=rows,
        )
        return result

    def call(self, algo: Algo, workspace: Tensor) -> Call:
        """The same with an algorithm of our choice."""

        def run(copy: int) -> None:
            addresses = self.weights[copy % len(self.weights)].data_ptr(), self.x.data_ptr(), self.out.data_ptr()
            self.product.run(
                algo, addresses, (workspace.data_ptr(), WORKSPACE_BYTES), torch.cuda.current_stream().cuda_stream
            )

        return run

    def is_right(self, call: Call) -> bool:
        """Whether it gives what torch gives."""
        self.out.fill_(float("nan"))
        call(0)
        return self.error() < LARGEST_ERROR

    def error(self) -> float:
        """How far `out` is from what torch gives, of the largest output."""
        wanted = self.wanted.float()
        return float((self.out.float() - wanted).abs().max() / wanted.abs().max())

    def tflops(self, us: float) -> float:
        """At so many microseconds."""
        return 2e-6 * self.num_rows * self.outputs * self.size / us


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Captured without a collection of garbage, which `torch.cuda.graph` begins with. The current stream is not the
    default one."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        for call in calls:
            call()
    finally:
        graph.capture_end()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Of one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / replays


@dataclass
class Search:
    """The candidates of one product, and what each took."""

    library: SearchedLt
    case: Case
    workspace: Tensor
    seen: dict[Config, tuple[float, Algo]] = field(default_factory=dict)
    offered: int = 0

    def quick(self, algo: Algo) -> None:
        """Time it for a moment, once; infinite where it does not run."""
        config = self.library.read(algo)
        if config in self.seen or self.case.product.workspace_of(algo) is None:
            return
        call = self.case.call(algo, self.workspace)
        us = float("inf")
        with contextlib.suppress(CublasError):
            call(0)
            count = max(2, min(24, round(300 / self.fastest)))
            graph = graph_of([lambda copy=copy: call(copy) for copy in range(count)])
            graph.replay()
            us = milliseconds(graph, 2) * 1000 / count
        self.seen[config] = us, algo

    @property
    def fastest(self) -> float:
        """Microseconds; a guess at first."""
        return min((us for us, _ in self.seen.values()), default=100.0)

    def best(self, count: int) -> list[Algo]:
        """Those that took least."""
        return [algo for _, algo in sorted(self.seen.values(), key=lambda found: found[0])[:count]]

    def run(self, seconds: float) -> list[Algo]:
        """The heuristic's first, and the best of all that there was time for, which are right."""
        until = time.perf_counter() + seconds
        offered = self.case.product.offered(MAX_RESULTS)
        for algo in offered:
            self.quick(algo)
        for _ in range(2):
            for algo in self.best(3):
                for other in self.library.neighbours(algo):
                    if time.perf_counter() > until:
                        break
                    self.quick(other)
        right = [algo for algo in self.best(24) if self.case.is_right(self.case.call(algo, self.workspace))]
        self.offered = len(offered)
        return [offered[0], *[algo for algo in right[:FINALISTS] if bytes(algo) != bytes(offered[0])]]


def by_turns(case: Case, calls: list[Call], rounds: int = 3) -> list[float]:
    """Microseconds of each call, all of them in turns: medians."""
    graphs, replays = [], []
    for call in calls:
        graphs.append(graph_of([lambda call=call, copy=copy: call(copy) for copy in range(2 * len(case.weights))]))
        graphs[-1].replay()
        replays.append(max(1, round(SLICE_MS / milliseconds(graphs[-1], 1))))
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        for place in range(len(calls)):
            one = (place + turn) % len(calls)
            times[one].append(milliseconds(graphs[one], replays[one]))
    return [statistics.median(found) * 1000 / (2 * len(case.weights)) for found in times]


def shown(config: Config) -> str:
    """In one word."""
    return "/".join(
        f"{name}{value}" for name, value in zip(("id", "t", "k", "r", "w", "c", "s", "i", "cl"), config, strict=True)
    )


def measure(library: SearchedLt, case: Case, workspace: Tensor, seconds: float) -> Call:
    """Print a product's line. The best call, torch's own where none is faster."""
    search = Search(library, case, workspace)
    try:
        algos = search.run(seconds)
    except CublasError as error:
        print(f"{case.kind} x{case.num_rows} {case.name}: {error}", flush=True)
        return case.torch_call
    calls = [case.torch_call, *(case.call(algo, workspace) for algo in algos)]
    times = by_turns(case, calls)
    best = min(range(1, len(calls)), key=lambda place: times[place])
    configs = [library.read(algo) for algo in algos]
    print(
        f"{case.kind} x{case.num_rows} {case.name}: torch {times[0]:.1f} us ({case.tflops(times[0]):.0f} TFLOP/s), "
        f"first {times[1]:.1f} {shown(configs[0])}, best {times[best]:.1f} ({case.tflops(times[best]):.0f}) "
        f"{shown(configs[best - 1])}; torch/best {times[0] / times[best]:.3f}; {search.offered} offered, "
        f"{len(search.seen)} timed; others {', '.join(f'{us:.1f}' for us in times[2:])}",
        flush=True,
    )
    result = {
        "kind": case.kind, "rows": case.num_rows, "name": case.name, "torch_us": times[0], "first_us": times[1],
        "best_us": times[best], "best": configs[best - 1], "first": configs[0],
    }  # fmt: skip
    print("JSON " + json.dumps(result), flush=True)
    return calls[best]


# --- whole layers -------------------------------------------------------------------------------------------------


def power() -> "subprocess.Popen[str] | None":
    """Begin to ask nvidia-smi for clock and power."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    try:
        return subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except OSError:
        return None


def gate_of(case: Case) -> Call:
    """The gated layer as the model has it in bfloat16: one kernel of ours where it takes it."""

    def run(copy: int) -> Tensor:
        weight = case.weights[copy % len(case.weights)]
        if gated_prompts.takes(case.x, weight):
            return gated_prompts.gated_many(case.x, weight, False)
        return gated(functional.linear(case.x, weight), False)

    return run


def layers(cases: dict[str, Case], best: dict[str, Call]) -> None:
    """Print what a layer takes, by turns."""
    first = next(iter(cases.values()))
    works: dict[str, list[Call]] = {
        "torch": [case.torch_call for case in cases.values()],
        "best": [best[name] for name in cases],
    }
    if first.kind == "bf16":
        up = cases["gate_up"]

        def best_apart(copy: int) -> None:
            best["gate_up"](copy)
            gated(up.out, False)

        works["torch, gated in one"] = [
            gate_of(case) if name == "gate_up" else case.torch_call for name, case in cases.items()
        ]
        works["best, gated in one"] = [gate_of(cases[name]) if name == "gate_up" else best[name] for name in cases]
        works["best, and gate"] = [best_apart if name == "gate_up" else best[name] for name in cases]
    count = 8
    for call in (call for calls in works.values() for call in calls):
        call(0)  # compiled and loaded before it is captured
    graphs = {
        name: graph_of([lambda call=call, copy=copy: call(copy) for copy in range(count) for call in calls])
        for name, calls in works.items()
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    said: dict[str, str] = {}
    for turn in range(3):
        for name, graph in graphs.items():
            replays = max(1, round(LAYER_SECONDS * 1000 / milliseconds(graph, 1)))
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            asked = power() if turn == 2 else None
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            if asked is not None:
                said[name] = asked.communicate()[0].split("\n")[0]
            times[name].append(start.elapsed_time(end) * 1000 / replays / count)
    for name, found in times.items():
        listed = ", ".join(f"{us:.1f}" for us in found)
        print(f"{first.kind} x{first.num_rows} layer, {name}: {listed} us; {said.get(name, '')}", flush=True)


def kernel_names(calls: dict[str, Call]) -> None:
    """Print which kernels they are."""
    from torch.profiler import ProfilerActivity, profile  # slow to import

    for call in calls.values():
        call(0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for call in calls.values():
            call(0)
        torch.cuda.synchronize()
    events = sorted((event for event in found.events() if event.device_time), key=lambda one: one.time_range.start)
    print("kernels, of " + ", ".join(calls))
    for event in events:
        print("   ", event.name[:120])


# --- processes ----------------------------------------------------------------------------------------------------


def run_kind(kind: str, rows: tuple[int, ...], seconds: float) -> None:
    """All products of one kind, in this process."""
    library = SearchedLt()
    launch.set_dependent(True)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    torch.manual_seed(0)
    print(
        f"{kind}: {torch.cuda.get_device_name()}, torch {torch.__version__}, cuBLASLt {library.version()}", flush=True
    )
    named: dict[str, Call] = {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for num_rows in rows:
            cases = {name: Case(library, kind, name, num_rows) for name in SHAPES}
            best = {name: measure(library, case, workspace, seconds) for name, case in cases.items()}
            layers(cases, best)
            for name, case in cases.items():
                named[f"{num_rows} {name} torch"] = case.torch_call
                named[f"{num_rows} {name} best"] = best[name]
        kernel_names(named)


def num_failed(children: list[subprocess.Popen[str]]) -> int:
    """Have processes that wait for a line measure, one after the other; how many end with an error."""
    failed = 0
    for child in children:
        child.communicate("begin\n")
        failed += child.returncode != 0
    return failed


def main() -> None:
    """Run every kind in a process, which starts while the one before measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS), help="kinds of numbers")
    parser.add_argument("--rows", default="", help="instead of those of each kind")
    parser.add_argument("--seconds", type=float, default=0.8, help="of search for each product")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    rows = tuple(map(int, asked.rows.split(","))) if asked.rows else ()
    if asked.child:
        torch.zeros(1, device="cuda")
        sys.stdin.readline()
        run_kind(asked.child, rows or ROWS[asked.child], asked.seconds)
        return
    command = [sys.executable, "-m", "benchmarks.gpu_cublas", "--rows", asked.rows, "--seconds", str(asked.seconds)]
    children = [
        subprocess.Popen([*command, "--child", kind], stdin=subprocess.PIPE, text=True)
        for kind in asked.only.split(",")
    ]
    sys.exit(num_failed(children))


if __name__ == "__main__":
    main()
