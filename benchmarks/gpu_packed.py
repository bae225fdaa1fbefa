"""Time of linear layers with weights of 4-bit integers in groups (W4A16) beside bfloat16 and 8-bit floats; run by
`benchmarks/gpu_kernels.py --only w4a16 [--sweep]`.

In captured graphs, with cold weights. `--sweep` tries the tiles of packed_choices.py, checks each against a product in
float32, and prints the lines of PACKED_MEASURED. Knows one GPU; under 150 s on an H200, compiling included.
"""

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional

from benchmarks.gpu_checked import checked_us
from benchmarks.gpu_kernels import COLD_BYTES, READ_GB_S, over, time_us
from pagemill.model.kernels import fp8, ops, packed
from pagemill.model.kernels.triton import launch, packed_choices
from pagemill.model.kernels.triton.choices import Shape
from pagemill.model.kernels.triton.packed import MAX_GATED_ROWS, by_choice

SHAPES: dict[str, Shape] = {
    "qkv": (6144, 4096, False), "o": (4096, 4096, False), "gate_up": (12288, 4096, True), "down": (4096, 12288, False),
}  # fmt: skip
"""Of Qwen3-8B."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
GROUP = 128
DTYPE = torch.bfloat16


def packed_weight(shape: Shape, bits: int = 4) -> packed.Packed:
    """A random weight, on the GPU."""
    outputs, inputs, gated = shape
    stacked = outputs * (2 if gated else 1)
    limit = 2 ** (bits - 1)
    values = torch.randint(-limit, limit, (stacked, inputs), dtype=torch.int8, device="cuda")
    scales = (torch.rand(stacked, inputs // GROUP, device="cuda") + 0.5) / limit / inputs**0.5
    return packed.pack(values, scales, None, GROUP, bits)


def copies(weight: packed.Packed) -> list[packed.Packed]:
    """As many as make the cache cold."""
    count = max(2, -(-COLD_BYTES // (weight.words.numel() * 2)))
    return [weight, *(replace(weight, words=weight.words.clone()) for _ in range(count - 1))]


def inside(shape: Shape, rows: int) -> Shape:
    """As the kernel sees it: beyond some rows the activation is another kernel."""
    outputs, inputs, gated = shape
    return (outputs * 2, inputs, False) if gated and rows > MAX_GATED_ROWS else shape


def call(x: torch.Tensor, shape: Shape, choice: packed_choices.PackedChoice) -> Callable[[packed.Packed], torch.Tensor]:
    """The layer with a choice of tiles, the activation included."""
    gate = "silu" if inside(shape, len(x))[2] else None
    late_gate = shape[2] and gate is None

    def run(weight: packed.Packed) -> torch.Tensor:
        result = by_choice(x, weight, choice, gate=gate)
        return ops.gated(result, "silu") if late_gate else result

    return run


def compile_one(task: tuple[Shape, int, packed_choices.PackedChoice]) -> str | None:
    """Compile a kernel in a process of its own, so that Triton's cache has it. The reason, where it cannot be."""
    shape, rows, choice = task
    launch.set_dependent(True)
    try:
        with launch.no_launches():
            stacked = shape[0] * (2 if shape[2] else 1)
            words = torch.empty(stacked // 64, shape[1] // 128, 64, 32, dtype=torch.int16, device="cuda")
            scales = torch.empty(shape[1] // GROUP, stacked, device="cuda")
            weight = packed.Packed(words, scales, None, stacked, shape[1], 4, GROUP)
            call(torch.empty(rows, shape[1], dtype=DTYPE, device="cuda"), shape, choice)(weight)
    except Exception as error:
        return f"{shape} x{rows} {choice}: {type(error).__name__}: {str(error)[:300]}"
    return None


def candidates(shape: Shape, rows: int) -> tuple[packed_choices.PackedChoice, ...]:
    """Of a shape and a class of rows."""
    return packed_choices.candidates(packed_choices.rows_class(rows), inside(shape, rows))


def compile_all(rows: tuple[int, ...], workers: int) -> None:
    """Fill Triton's cache."""
    started = time.perf_counter()
    tasks = {}
    for shape in SHAPES.values():
        for count in rows:
            for choice in candidates(shape, count):
                tasks.setdefault((inside(shape, count)[1:], choice), (shape, count, choice))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        failures = [failure for failure in pool.map(compile_one, tasks.values(), chunksize=4) if failure]
    print(f"compiled {len(tasks)} kernels in {time.perf_counter() - started:.1f} s, {len(failures)} cannot be")
    for failure in failures[:6]:
        print("   ", failure)


def sweep(rows: tuple[int, ...], workers: int, seconds: float) -> None:
    """The best tiles of every shape and class of rows, which are the choice from then on."""
    compile_all(rows, workers)
    until = time.perf_counter() + seconds
    for name, shape in SHAPES.items():
        weight = packed_weight(shape)
        weights = copies(weight)
        plain = packed.reference_floats(weight, torch.float32)
        for count in rows:
            if time.perf_counter() > until:
                print("# out of time")
                return
            x = torch.randn(count, shape[1], device="cuda").to(DTYPE)
            wanted = functional.linear(x.float(), plain)
            if shape[2]:
                first, second = wanted.chunk(2, -1)
                wanted = functional.silu(first) * second
            times = {}
            for choice in candidates(shape, count):
                times[choice] = choice_us(call(x, shape, choice), weights, wanted, choice)
            best = min(times, key=lambda one: times[one])
            if count <= MAX_GATED_ROWS and not best.slices:
                for prefetch in packed_choices.PREFETCHES:
                    other = replace(best, prefetch=prefetch)
                    times[other] = choice_us(call(x, shape, other), weights, wanted, other)
            found = sorted(times, key=lambda one: times[one])
            key = packed_choices.rows_class(count), inside(shape, count), 4
            packed_choices.PACKED_MEASURED[key] = found[0]
            print(f"    {key}: {found[0]},  # {name} {times[found[0]]:.1f} us; then", end=" ")
            print("; ".join(f"{times[one]:.1f} {_short(one)}" for one in found[1:5]), flush=True)
        del weights, plain


def _short(choice: packed_choices.PackedChoice) -> str:
    return (
        f"{choice.block_m}x{choice.block_n} w{choice.num_warps} s{choice.num_stages} k{choice.split_k}/{choice.slices} "
        f"{'late' if choice.late else 'early'} p{choice.prefetch >> 10}"
    )


def choice_us(run: Callable, weights: list, wanted: torch.Tensor, choice: packed_choices.PackedChoice) -> float:
    """Time of a choice that computes what is wanted."""
    return checked_us(run, weights, wanted, choice, lambda: time_us(over(weights, run), replays=3))


def others_us(shape: Shape, rows: int) -> tuple[float, float]:
    """Microseconds of the same layer in 8-bit floats and in bfloat16."""
    outputs, inputs, gated = shape
    stacked = outputs * (2 if gated else 1)
    gate = "silu" if gated else None
    count = max(2, -(-COLD_BYTES // (stacked * inputs)))
    x = torch.randn(rows, inputs, device="cuda").to(DTYPE)
    plain = [torch.randn(stacked, inputs, dtype=DTYPE, device="cuda") / inputs**0.5 for _ in range(count)]
    eight = [fp8.quantize(weight) for weight in plain]
    bf16 = time_us(over(plain, lambda weight: ops.linear(x, weight, None, gate)))
    return time_us(over(eight, lambda weight: fp8.linear(x, *weight, None, gate))), bf16


def bench(results: list[dict], rows: tuple[int, ...] = ROWS) -> None:
    """Every shape and number of rows, by the choices that stand."""
    print(
        f"\n{'W4A16, groups of 128':<24}{'ours us':>9}{'GB/s':>7}{'of read':>9}{'TFLOP/s':>9}{'fp8 us':>9}"
        f"{'fp8/ours':>9}{'bf16 us':>9}{'bf16/ours':>10}  tiles"
    )
    sums: dict[int, list[float]] = {count: [0.0, 0.0, 0.0] for count in rows}
    for name, shape in SHAPES.items():
        weights = copies(packed_weight(shape))
        gate = "silu" if shape[2] else None
        size = weights[0].words.numel() * 2 + weights[0].scales.numel() * 4
        for count in rows:
            x = torch.randn(count, shape[1], device="cuda").to(DTYPE)
            us = time_us(over(weights, lambda weight, x=x, gate=gate: packed.linear(x, weight, None, gate)))
            eight, bf16 = others_us(shape, count)
            sums[count] = [total + one for total, one in zip(sums[count], (us, eight, bf16), strict=True)]
            tflops = 2 * count * weights[0].num_outputs * shape[1] / us / 1e6
            print(
                f"{f'{name} x{count}':<24}{us:>9.1f}{size / us / 1e3:>7.0f}{size / us / 1e3 / READ_GB_S:>9.0%}"
                f"{tflops:>9.1f}{eight:>9.1f}{eight / us:>9.2f}{bf16:>9.1f}{bf16 / us:>10.2f}  "
                f"{_short(packed_choices.packed_choice(count, inside(shape, count), 4))}"
            )
            results.append({"kernel": "w4a16", "name": name, "rows": count, "us": us, "fp8_us": eight, "bf16_us": bf16})
        del weights
    for count, (us, eight, bf16) in sums.items():
        print(
            f"a layer x{count}: {us:.1f} us, fp8 {eight:.1f} ({eight / us:.2f}), bfloat16 {bf16:.1f} ({bf16 / us:.2f})"
        )


def run(
    results: list[dict], *, swept: bool, workers: int, rows: tuple[int, ...] = ROWS, seconds: float = 100.0
) -> None:
    """What `--only w4a16` does."""
    launch.set_dependent(torch.cuda.get_device_capability() >= (9, 0))
    if swept:
        sweep(rows, workers, seconds)
    bench(results, rows)
