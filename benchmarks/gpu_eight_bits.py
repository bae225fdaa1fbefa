"""Time of linear layers with weights of 8-bit floats in blocks of 128 x 128, and of 8-bit integers (W8A8), beside 8-bit
floats with a scale per output; run by `benchmarks/gpu_kernels.py --only fp8-blocks [--sweep] [--rows 1,256]`.

In captured graphs, with cold weights. `--sweep` tries the tiles of eight_bits_choices.py, checks each against a product
in float32, and prints the lines of ONE_ROW_MEASURED and FEW_MEASURED. Knows one GPU; under 90 s on an H200, compiling
included.
"""

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.gpu_checked import checked_us
from benchmarks.gpu_kernels import COLD_BYTES, DTYPE, over, time_us
from benchmarks.gpu_packed import SHAPES
from pagemill.model.kernels import eight_bits, fp8, ops
from pagemill.model.kernels.triton import eight_bits_choices, eight_bits_many, eight_bits_quantize, launch
from pagemill.model.kernels.triton.choices import GemvChoice, Shape
from pagemill.model.kernels.triton.eight_bits_gemv import blocks_gemv
from pagemill.model.kernels.triton.eight_bits_rows import few_rows
from pagemill.model.quantization import fp8_blocks

ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)


def stacked(shape: Shape) -> int:
    """Outputs of both halves."""
    return shape[0] * (2 if shape[2] else 1)


def weights_of(shape: Shape, *, integers: bool = False) -> list[eight_bits.EightBits]:
    """Random ones, as many as make the cache cold."""
    plain = torch.randn(stacked(shape), shape[1], device="cuda") / shape[1] ** 0.5
    if integers:
        scales = plain.abs().amax(1) / 127
        made = eight_bits.integers((plain / scales[:, None]).round().to(torch.int8), scales)
    else:
        held = fp8_blocks.quantize(plain)
        made = eight_bits.blocks_of_floats(held.values, held.scales)
    count = max(2, -(-COLD_BYTES // plain.numel()))
    return [made, *(replace(made, values=made.values.clone()) for _ in range(count - 1))]


def calls(x: torch.Tensor, shape: Shape, choice: object) -> Callable[[eight_bits.EightBits], torch.Tensor]:
    """The layer with a choice of tiles, the activation included."""
    gate = "silu" if shape[2] else None
    if isinstance(choice, GemvChoice):
        return lambda weight: blocks_gemv(x, weight, choice, gate=gate)
    if isinstance(choice, eight_bits_choices.FewChoice):
        return lambda weight: few_rows(x, weight, choice, gate=gate)

    def many(weight: eight_bits.EightBits) -> torch.Tensor:
        numbers, factors = eight_bits_quantize.quantize(x, weight.group, weight.values.dtype)
        result = eight_bits_many.product(numbers, factors, weight, choice, x.dtype)
        return result if gate is None else ops.gated(result, gate)

    return many


def candidates(shape: Shape, rows: int) -> tuple[object, ...]:
    """Of a shape and a number of rows."""
    if rows == 1:
        return eight_bits_choices.ONE_ROW_CANDIDATES
    if rows > eight_bits_choices.MAX_FEW_ROWS:
        return eight_bits_choices.MANY_CANDIDATES
    return eight_bits_choices.few_candidates(eight_bits_choices.rows_class(rows), shape)


def compile_one(task: tuple[Shape, int, object]) -> str | None:
    """Compile a kernel in a process of its own, so that Triton's cache has it. The reason, where it cannot be."""
    shape, rows, choice = task
    launch.set_dependent(True)
    try:
        with launch.no_launches():
            values = torch.empty(stacked(shape), shape[1], dtype=torch.float8_e4m3fn, device="cuda")
            scales = torch.empty(shape[1] // 128, stacked(shape) // 128, device="cuda")
            weight = eight_bits.EightBits(values, scales, 128, 128)
            calls(torch.empty(rows, shape[1], dtype=DTYPE, device="cuda"), shape, choice)(weight)
    except Exception as error:
        return f"{shape} x{rows} {choice}: {type(error).__name__}: {str(error)[:300]}"
    return None


def compile_all(rows: tuple[int, ...], workers: int) -> None:
    """Fill Triton's cache."""
    started = time.perf_counter()
    tasks = {}
    for shape in SHAPES.values():
        for count in rows:
            for choice in candidates(shape, count):
                tasks.setdefault((shape, choice), (shape, count, choice))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        failures = [failure for failure in pool.map(compile_one, tasks.values(), chunksize=4) if failure]
    print(f"compiled {len(tasks)} kernels in {time.perf_counter() - started:.1f} s, {len(failures)} cannot be")
    for failure in failures[:6]:
        print("   ", failure)


def sweep(rows: tuple[int, ...], workers: int, seconds: float) -> None:
    """The best tiles of every shape and class of rows, which are the choice from then on where rows are few."""
    compile_all(rows, workers)
    until = time.perf_counter() + seconds
    for count in rows:
        for name, shape in SHAPES.items():
            if time.perf_counter() > until:
                print("# out of time")
                return
            weights = weights_of(shape)
            x = torch.randn(count, shape[1], device="cuda").to(DTYPE)
            plain = x
            if count > eight_bits_choices.MAX_FEW_ROWS:
                numbers, factors = eight_bits.reference_quantize(x, weights[0].group, weights[0].values.dtype)
                plain = eight_bits.floats(eight_bits.EightBits(numbers, factors, weights[0].group, 1), DTYPE)
            wanted = eight_bits.reference_linear(plain, weights[0], None, "silu" if shape[2] else None)
            times = {}
            for choice in candidates(shape, count):
                run = calls(x, shape, choice)
                measure = lambda run=run: time_us(over(weights, run), replays=3)  # noqa: B023, E731 - called at once
                times[choice] = checked_us(run, weights, wanted, choice, measure)
            found = sorted(times, key=lambda one: times[one])
            if count == 1:
                eight_bits_choices.ONE_ROW_MEASURED[shape] = found[0]
            elif count <= eight_bits_choices.MAX_FEW_ROWS:
                eight_bits_choices.FEW_MEASURED[eight_bits_choices.rows_class(count), shape] = found[0]
            print(f"    ({count}, {shape}): {found[0]},  # {name} {times[found[0]]:.1f} us; then", end=" ")
            print("; ".join(f"{times[one]:.1f} {one}" for one in found[1:3]), flush=True)


def bench(results: list[dict], rows: tuple[int, ...]) -> None:
    """Every shape and number of rows, by the choices that stand."""
    print(f"\n{'8 bits':<16}{'blocks us':>10}{'int8 us':>10}{'fp8 us':>10}{'blocks/fp8':>12}")
    sums = {count: [0.0, 0.0, 0.0] for count in rows}
    for name, shape in SHAPES.items():
        gate = "silu" if shape[2] else None
        blocks = weights_of(shape)
        integers = weights_of(shape, integers=True)
        plain = [fp8.quantize(eight_bits.floats(weight, DTYPE)) for weight in blocks]
        for count in rows:
            x = torch.randn(count, shape[1], device="cuda").to(DTYPE)

            def ours(weight: eight_bits.EightBits, x: torch.Tensor = x, gate: str | None = gate) -> torch.Tensor:
                return eight_bits.linear(x, weight, None, gate)

            times = (
                time_us(over(blocks, ours)),
                time_us(over(integers, ours)),
                time_us(over(plain, lambda weight, x=x, gate=gate: fp8.linear(x, *weight, None, gate))),
            )
            sums[count] = [total + one for total, one in zip(sums[count], times, strict=True)]
            print(
                f"{f'{name} x{count}':<16}" + "".join(f"{us:>10.1f}" for us in times) + f"{times[0] / times[2]:>12.2f}"
            )
            results.append(dict(zip(("blocks_us", "int8_us", "fp8_us"), times, strict=True), name=name, rows=count))
    for count, (ours_us, int8_us, fp8_us) in sums.items():
        print(
            f"a layer x{count}: blocks {ours_us:.1f} us, int8 {int8_us:.1f}, fp8 {fp8_us:.1f} ({ours_us / fp8_us:.2f})"
        )


def run(results: list[dict], *, swept: bool, workers: int, rows: tuple[int, ...] = ROWS, seconds: float = 60.0) -> None:
    """What `--only fp8-blocks` does."""
    launch.set_dependent(torch.cuda.get_device_capability() >= (9, 0))
    if swept:
        sweep(rows, workers, seconds)
    bench(results, rows)
