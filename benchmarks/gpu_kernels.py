"""Time of every GPU kernel but attention, in captured graphs with cold weights, beside cuBLAS and plain torch.

    PYTHONPATH=. python benchmarks/gpu_kernels.py [--only linear|skinny|small|layer|sampling] [--json FILE]
    PYTHONPATH=. python benchmarks/gpu_kernels.py --only w4a16|fp8-blocks [--sweep] [--rows 1,256] [--json FILE]

Tries the tiles of choices.py on the shapes of two models, prints the best of each shape and, at the end, the lines of
choices.py that make them the choice. Kernels are compiled by several processes first, into Triton's own cache. Knows
one GPU; under three minutes on an H200, compiling included.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from benchmarks.gpu_checked import checked_us
from pagemill.model.kernels import reference
from pagemill.model.kernels.kv_target import KVTarget
from pagemill.model.kernels.routing import Routing
from pagemill.model.kernels.triton import choices, device, launch, linear
from pagemill.model.kernels.triton.gemv import gemv
from pagemill.model.kernels.triton.moe_choices import grouped_choices
from pagemill.model.kernels.triton.moe_grouped import combine
from pagemill.model.kernels.triton.moe_route import route
from pagemill.model.kernels.triton.moe_sort import sort_slots
from pagemill.model.kernels.triton.norm_before import NormBefore
from pagemill.model.kernels.triton.skinny import skinny

READ_GB_S = 4589
"""Read bandwidth of an H200, measured; other GPUs: compare the times, not the shares."""
COLD_BYTES = 160 << 20
"""Weights that are gone through before one is read again: three times the L2 cache."""
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """Sizes of a dense decoder."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocab: int
    layers: int
    qk_norm: bool

    def linears(self) -> dict[str, choices.Shape]:
        """Name -> shape of each linear layer."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head, self.hidden, False),
            "o": (self.hidden, self.heads * self.head, False),
            "gate_up": (self.inner, self.hidden, True),
            "down": (self.hidden, self.inner, False),
            "lm_head": (self.vocab, self.hidden, False),
        }


MODELS = (
    Model("qwen3-8b", 4096, 32, 8, 128, 12288, 151936, 36, True),
    Model("llama-3.2-1b", 2048, 32, 8, 64, 8192, 128256, 16, False),
)
SKINNY_ROWS = (8, 32, 64)


def weights_of(shape: choices.Shape) -> list[torch.Tensor]:
    """As many weights of a shape as make the cache cold, two at least."""
    outputs, inputs, gated = shape
    rows = outputs * (2 if gated else 1)
    count = max(2, -(-COLD_BYTES // (rows * inputs * 2)))
    return [torch.randn(rows, inputs, dtype=DTYPE, device="cuda") / inputs**0.5 for _ in range(count)]


def time_us(calls: Iterable[Callable[[], object]], replays: int = 7) -> float:
    """Microseconds of one call, of these in one captured graph, gaps included: the median of the replays."""
    calls = list(calls)
    stream = torch.cuda.Stream()
    # What the calls read is made on another stream, addresses among it (slots of the KV cache).
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def over(weights: list[torch.Tensor], call: Callable[[torch.Tensor], object]) -> list[Callable[[], object]]:
    """The call for each weight, often enough for a time that can be measured."""
    rounds = max(1, 24 // len(weights))
    return [lambda weight=weight: call(weight) for weight in weights * rounds]


# --- compiling ahead ----------------------------------------------------------------------------------------------


def compile_one(task: tuple[str, choices.Shape, object, int]) -> str | None:
    """Run a kernel once in a process of its own, so that Triton's cache has it. The reason, where it does not run."""
    kind, shape, choice, num_rows = task
    outputs, inputs, gated = shape
    gate = "silu" if gated else None
    try:
        weight = torch.zeros(outputs * (2 if gated else 1), inputs, dtype=DTYPE, device="cuda")
        x = torch.zeros(num_rows, inputs, dtype=DTYPE, device="cuda")
        wide = torch.float32 if outputs > 100_000 else None
        if kind == "gemv":
            gemv(x, weight, choice, gate=gate, out_dtype=wide)
        else:
            skinny_call(x, shape, choice)(weight)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{kind} {shape} {choice}: {type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(tasks: list[tuple[str, choices.Shape, object, int]], workers: int) -> None:
    """Fill Triton's cache."""
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        failures = [failure for failure in pool.map(compile_one, tasks, chunksize=2) if failure]
    print(f"compiled {len(tasks)} kernels in {time.perf_counter() - started:.1f} s, {len(failures)} cannot be")
    for failure in failures[:8]:
        print("   ", failure)


def tasks_of(only: str | None) -> list[tuple[str, choices.Shape, object, int]]:
    """Every candidate of every shape, once."""
    shapes = {shape for model in MODELS for shape in model.linears().values()}
    tasks: list[tuple[str, choices.Shape, object, int]] = []
    if only in (None, "linear", "layer"):
        tasks += [("gemv", shape, choice, 1) for shape in shapes for choice in choices.GEMV_CANDIDATES]
    return tasks


# --- linear layers ------------------------------------------------------------------------------------------------


def attempt(calls: list[Callable[[], object]]) -> float:
    """Time, or infinity where a kernel cannot run (too much shared memory)."""
    try:
        return time_us(calls)
    except Exception as error:
        if "out of resource" not in str(error).lower() and "OutOfResources" not in type(error).__name__:
            raise
        return float("inf")


def one_row(model: Model, name: str, shape: choices.Shape) -> dict:
    """The best tiles of a shape, its time with the norm inside and before it, and that of cuBLAS."""
    weights, (_, inputs, gated) = weights_of(shape), shape
    gate, wide = ("silu" if gated else None), (torch.float32 if name == "lm_head" else None)
    x, norm = torch.randn(1, inputs, dtype=DTYPE, device="cuda"), torch.randn(inputs, dtype=DTYPE, device="cuda")
    residual = torch.randn_like(x)
    cublas = time_us(over(weights, lambda w: functional.linear(x, w)))

    def run(choice: choices.GemvChoice) -> Callable[[torch.Tensor], object]:
        return lambda w: gemv(x, w, choice, gate=gate, out_dtype=wide)

    times = {choice: attempt(over(weights, run(choice))) for choice in choices.GEMV_CANDIDATES}
    best = min(times, key=lambda choice: times[choice])
    before = NormBefore(norm, 1e-6, residual, torch.empty_like(x))
    with_norm = apart = float("nan")
    if name in ("qkv", "gate_up"):
        with_norm = time_us(over(weights, lambda w: gemv(x, w, best, gate=gate, norm=before)))
        normed_first = over(weights, lambda w: gemv(device.rms_norm(x, norm, 1e-6, residual), w, best, gate=gate))
        apart = time_us(normed_first)
    share = weights[0].numel() * 2 / times[best] / 1e3 / READ_GB_S
    print(
        f"{model.name + ' ' + name:<28}{cublas:>10.1f}{times[best]:>9.1f}{share:>9.0%}{with_norm:>11.1f}"
        f"{apart:>11.1f}  {best}"
    )
    return {
        "kernel": "gemv", "model": model.name, "name": name, "us": times[best], "cublas_us": cublas, "share": share,
        "with_norm_us": with_norm, "norm_apart_us": apart, "choice": repr(best), "shape": shape, "best": best,
        "all": {repr(choice): us for choice, us in times.items()},
    }  # fmt: skip


def bench_linear(results: list[dict], measured: dict, fused: set) -> None:
    """One row, every shape."""
    print(f"\n{'one row':<28}{'cuBLAS us':>10}{'ours us':>9}{'of read':>9}{'with norm':>11}{'norm + it':>11}  tiles")
    for model in MODELS:
        rows = [one_row(model, name, shape) for name, shape in model.linears().items()]
        for row in rows:
            shape = row.pop("shape")
            measured[shape] = row.pop("best")
            if row["with_norm_us"] < row["norm_apart_us"]:
                fused.add(shape)
        results += rows
        ours, cublas = (sum(row[key] for row in rows[:-1]) * model.layers / 1e3 for key in ("us", "cublas_us"))
        print(f"{model.name}: linears of {model.layers} layers {ours:.2f} ms, cuBLAS {cublas:.2f} ms")


def skinny_call(x: torch.Tensor, shape: choices.Shape, choice: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer by a kernel of ours, or by cuBLAS where there is no choice."""
    gate, wide = ("silu" if shape[2] else None), (torch.float32 if shape[0] > 100_000 else None)

    def blas(w: torch.Tensor) -> torch.Tensor:
        if wide is not None:
            return linear._wide(x, w, None, wide)
        result = functional.linear(x, w)
        return device.gated(result, False) if gate else result

    if choice is None:
        return blas
    return lambda w: skinny(x, w, choice, gate=gate, out_dtype=wide)


def skinny_us(x: torch.Tensor, shape: choices.Shape, weights: list[torch.Tensor], choice: object) -> float:
    """Time of a choice that computes what cuBLAS does."""
    call, wanted = skinny_call(x, shape, choice), skinny_call(x, shape, None)(weights[0])
    return checked_us(call, weights, wanted, choice, lambda: attempt(over(weights, call)))


def bench_skinny(results: list[dict], measured: dict, workers: int) -> None:
    """A few rows, every shape: cuBLAS, the choice of the table, all candidates."""
    shapes = {shape: f"{model.name} {name}" for model in MODELS for name, shape in model.linears().items()}
    candidates = {
        (rows, shape): choices.skinny_candidates(shape, choices.rows_class(rows))
        for shape in shapes
        for rows in SKINNY_ROWS
    }
    compile_all([("skinny", key[1], choice, key[0]) for key, some in candidates.items() for choice in some], workers)
    print(f"\n{'few rows':<30}{'cuBLAS us':>10}{'table us':>9}{'ours us':>9}{'of read':>9}  tiles")
    for shape, name in shapes.items():
        weights = weights_of(shape)
        for rows in SKINNY_ROWS:
            x = torch.randn(rows, shape[1], dtype=DTYPE, device="cuda")
            times = {c: skinny_us(x, shape, weights, c) for c in (None, *candidates[rows, shape])}
            results.append(report_few(shape, name, rows, times, measured))
        del weights


def report_few(shape: choices.Shape, name: str, rows: int, times: dict, measured: dict) -> dict:
    """Print the times of one shape, and note the best."""
    key, blas = (choices.rows_class(rows), shape), times[None]
    ours = {choice: us for choice, us in times.items() if choice is not None}
    best, table = min(ours, key=lambda choice: ours[choice]), times[choices.SKINNY_MEASURED.get(key)]
    measured[key] = best, ours[best] < blas
    share = shape[0] * shape[1] * (4 if shape[2] else 2) / ours[best] / 1e3 / READ_GB_S
    print(f"{f'{name} x{rows}':<30}{blas:>10.1f}{table:>9.1f}{ours[best]:>9.1f}{share:>9.0%}  {best}")
    return {
        "kernel": "skinny", "name": name, "rows": rows, "us": ours[best], "cublas_us": blas, "table_us": table,
        "share": share, "choice": repr(best), "all": {repr(choice): us for choice, us in times.items()},
    }  # fmt: skip


def bench_few_layers(results: list[dict], measured: dict) -> None:
    """Layers without attention of a few rows, where a kernel's start may hide behind the one before: by cuBLAS, by the
    table, by the best of ours for each shape, and by these but for one shape, which is cuBLAS's; then the table's lines
    as they are best in layers."""
    launch.set_dependent(torch.cuda.get_device_capability() >= (9, 0))
    names = ("qkv", "o", "gate_up", "down")
    print(f"\n{'layers without attention, us a layer':<38}{'cuBLAS':>9}{'table':>9}{'ours':>9}", end="")
    print("".join(f"{f'but {name}':>13}" for name in names))
    table = dict(choices.SKINNY_MEASURED)
    ours = {key: choice for key, (choice, _) in measured.items()}
    for model in MODELS:
        shapes = model.linears()
        others = [{key: choice for key, choice in ours.items() if key[1] != shapes[name]} for name in names]
        for rows in SKINNY_ROWS:
            step, times = layer_step(model, rows, 8), []
            for chosen in ({}, table, ours, *others):
                choices.SKINNY_MEASURED.clear()
                choices.SKINNY_MEASURED.update(chosen)
                times.append(time_us([step]) / 8)
            widths = (9, 9, 9, 13, 13, 13, 13)
            print(
                f"{f'{model.name} x{rows}':<38}" + "".join(f"{us:>{w}.1f}" for us, w in zip(times, widths, strict=True))
            )
            tuned = tune_in_layers(step, [shapes[name] for name in names], choices.rows_class(rows), table)
            results.append({"kernel": "few layers", "model": model.name, "rows": rows, "us": [*times, tuned]})
            del step
    choices.SKINNY_MEASURED.clear()
    choices.SKINNY_MEASURED.update(table)


def tune_in_layers(step: Callable[[], object], shapes: list[choices.Shape], rows: int, table: dict) -> float:
    """From the table on, all candidates and cuBLAS for one shape after the other. Microseconds of a layer."""
    chosen, least = dict(table), float("inf")
    for shape in shapes:
        key, times = (rows, shape), {}
        for choice in (None, *choices.skinny_candidates(shape, rows)):
            choices.SKINNY_MEASURED.clear()
            choices.SKINNY_MEASURED.update({k: c for k, c in (chosen | {key: choice}).items() if c is not None})
            times[choice] = attempt([step]) / 8
        best = min(times, key=lambda choice: times[choice])
        # What is no faster than the noise stays.
        if times[best] < 0.995 * times.get(chosen.get(key), float("inf")):
            chosen[key] = best
        least = times[chosen.get(key)]
        print(f"    {key}: {chosen.get(key)},  # {least:.1f} us a layer")
    return least


# --- everything else ----------------------------------------------------------------------------------------------


def sampling_rows(num_rows: int, *asked: tuple[float, float, float, int]) -> torch.Tensor:
    """Settings of as many rows: (temperature, top_p, min_p, top_k) in turn; temperature 0 is greedy."""
    rows = np.zeros((num_rows, 7), np.int32)
    for row in range(num_rows):
        temperature, top_p, min_p, top_k = asked[row % len(asked)]
        rows[row, :3] = np.array([temperature or 1.0, top_p, min_p], np.float32).view(np.int32)
        rows[row, 3:5] = top_k, temperature == 0
    rows[:, 5] = np.arange(num_rows)
    return torch.from_numpy(rows).cuda()


SAMPLING = {
    "greedy": [(0.0, 1.0, 0.0, 0)],
    "temperature": [(0.8, 1.0, 0.0, 0)],
    "top_k 50": [(0.8, 1.0, 0.0, 50)],
    "top_k 50, top_p .95": [(0.8, 0.95, 0.0, 50)],
    "top_p .9": [(0.8, 0.9, 0.0, 0)],
    "top_p .5": [(0.8, 0.5, 0.0, 0)],
    "min_p .05": [(0.8, 1.0, 0.05, 0)],
    "min_p .05, top_p .9": [(0.8, 0.9, 0.05, 0)],
    "top_k 2000, top_p .9": [(0.8, 0.9, 0.0, 2000)],
}
SAMPLING["a mix"] = [each for asked in SAMPLING.values() for each in asked]


def logits_like(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """[rows, vocab] float32: "flat" as of dummy weights, "normal" (times 3), "peaked" as of a trained model."""
    logits = torch.randn(rows, vocab, device="cuda") * {"flat": 0.04, "normal": 3.0, "peaked": 2.0}[kind]
    if kind == "peaked":
        best = torch.randint(0, vocab, (rows, 50), device="cuda")
        logits.scatter_add_(1, best, 6 + 3 * torch.empty(rows, 50, device="cuda").exponential_())
    return logits.bfloat16().float()


def bench_sampling(results: list[dict]) -> None:
    """Every mix of parameters, on logits of several kinds, beside the argmax that greedy steps end with."""
    for model in MODELS:
        for rows in (1, 16, 256):
            positions, kinds = torch.arange(rows, device="cuda"), ("flat", "normal", "peaked")
            logits = {kind: logits_like(kind, rows, model.vocab) for kind in kinds}
            plain = [time_us([lambda each=logits[kind]: device.argmax(each)] * 20) for kind in kinds]
            print(f"\n{f'{model.name} x{rows}, us':<40}" + "".join(f"{kind:>10}" for kind in kinds))
            print(f"{'argmax':<40}" + "".join(f"{us:>10.1f}" for us in plain), flush=True)
            for name, asked in SAMPLING.items():
                settings = sampling_rows(rows, *asked)
                us = [
                    time_us([lambda each=logits[kind], s=settings, at=positions: device.sample_rows(each, s, at)] * 8)
                    for kind in kinds
                ]
                print(f"{name:<40}" + "".join(f"{each:>10.1f}" for each in us), flush=True)
                results.append({"kernel": f"sample {name}", "model": model.name, "rows": rows, "us": us})


def small_cases(model: Model, rows: int) -> dict[str, tuple[Callable, Callable | None, float]]:
    """Name -> (ours, plain torch, bytes that must be moved)."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, device="cuda")

    size = (model.heads + 2 * model.kv_heads) * model.head
    x, residual, weight, inner = random(rows, model.hidden), random(rows, model.hidden), random(model.hidden), random(
        rows, 2 * model.inner)  # fmt: skip
    qkv, rope = random(rows, size), (random(rows, model.head), random(rows, model.head))
    norms = ((random(model.head), 1e-6), (random(model.head), 1e-6)) if model.qk_norm else None
    cache = torch.zeros(max(8, rows // 8), 2, 16, model.kv_heads, model.head, dtype=DTYPE, device="cuda")
    target = KVTarget(cache[:, 0], cache[:, 1], torch.arange(rows, device="cuda"))
    logits = torch.randn(rows, model.vocab, device="cuda") * 3
    half_logits = logits.to(DTYPE)
    positions = torch.arange(rows, device="cuda")
    some = {
        "top_k 50, top_p .95": sampling_rows(rows, (1.0, 0.95, 0.0, 50)),
        "top_p .95": sampling_rows(rows, (1.0, 0.95, 0.0, 0)),
        "top_p .95, flat": sampling_rows(rows, (20.0, 0.95, 0.0, 0)),
        "no limit": sampling_rows(rows, (1.0, 1.0, 0.0, 0)),
    }
    all_logits = logits.numel() * 4
    cases: dict[str, tuple[Callable, Callable | None, float]] = {
        "rms_norm + residual": (
            lambda: device.rms_norm(x, weight, 1e-6, residual), lambda: reference.rms_norm(x, weight, 1e-6, residual),
            8 * x.numel(),
        ),
        "silu_mul": (lambda: device.gated(inner, False), lambda: reference.gated(inner, False), 3 * inner.numel()),
        "norms, rotary, KV write": (
            lambda: device.attention_inputs(qkv, model.heads, model.head, rope, norms, target), None, 4 * qkv.numel()
        ),
        "argmax": (lambda: device.argmax(logits), lambda: logits.argmax(-1), all_logits),
        "argmax, bfloat16": (lambda: device.argmax(half_logits), lambda: half_logits.argmax(-1), all_logits / 2),
    }  # fmt: skip
    for name, settings in some.items():
        cases[f"sample {name}"] = (
            lambda s=settings: device.sample_rows(logits, s, positions), None, all_logits
        )  # fmt: skip
    return cases


def prefill_cases(heads: int, kv_heads: int, head: int, qk_norm: bool, tokens: int) -> tuple[Callable, float]:
    """Attention inputs of a prefill, and the bytes that they move."""
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head, dtype=DTYPE, device="cuda")
    rope = tuple(torch.randn(tokens, head, dtype=DTYPE, device="cuda") for _ in range(2))
    norm = (torch.randn(head, dtype=DTYPE, device="cuda"), 1e-6)
    cache = torch.zeros(tokens // 16, 2, 16, kv_heads, head, dtype=DTYPE, device="cuda")
    target = KVTarget(cache[:, 0], cache[:, 1], torch.arange(tokens, device="cuda"))
    norms = (norm, norm) if qk_norm else None
    return lambda: device.attention_inputs(qkv, heads, head, rope, norms, target), 4 * qkv.numel()


def expert_cases(tokens: int) -> dict[str, tuple[Callable, float]]:
    """What surrounds the products of a layer of experts, of Qwen3-30B-A3B: calls, and the bytes that they move."""
    num_experts, top_k, size = 128, 8, 2048
    logits = torch.randn(tokens, num_experts, device="cuda")
    parts = torch.randn(tokens * top_k, size, dtype=DTYPE, device="cuda")
    routing = Routing(top_k, renormalize=True)
    chosen, weights = route(logits, routing)
    tile = grouped_choices(chosen.numel(), num_experts)[0].block_m
    slots = tokens * top_k
    return {
        "route": (lambda: route(logits, routing), logits.numel() * 4 + slots * 8),
        "sort slots": (lambda: sort_slots(chosen, 0, num_experts, tile), slots * 8),
        "combine": (lambda: combine(parts, chosen, weights, 0, num_experts), (slots + tokens) * size * 2),
    }


def bench_many(results: list[dict]) -> None:
    """Attention inputs of a prefill, and the small kernels of mixtures of experts."""
    cases = {
        f"{name} attention inputs x8192": prefill_cases(*sizes, 8192)
        for name, sizes in {
            "llama-3.2-1b": (32, 8, 64, False), "qwen3-8b": (32, 8, 128, True), "qwen3-30b-a3b": (32, 4, 128, True),
        }.items()
    }  # fmt: skip
    for tokens in (256, 8192):
        cases |= {f"qwen3-30b-a3b {name} x{tokens}": case for name, case in expert_cases(tokens).items()}
    print(f"\n{'prefill, experts':<48}{'floor us':>10}{'ours us':>9}{'of read':>9}")
    for name, (call, size) in cases.items():
        us, floor = time_us([call] * 20), size / READ_GB_S / 1e3
        print(f"{name:<48}{floor:>10.1f}{us:>9.1f}{floor / us:>9.0%}")
        results.append({"kernel": name, "us": us, "floor_us": floor})


def bench_small(results: list[dict]) -> None:
    """Kernels around the linear layers, for one row and for many."""
    print(f"\n{'others':<48}{'torch us':>10}{'ours us':>9}{'of read':>9}")
    for model in MODELS:
        for rows in (1, 256):
            for name, (ours, plain, size) in small_cases(model, rows).items():
                us = time_us([ours] * 20)
                torch_us = float("nan") if plain is None else time_us([plain] * 20)
                share = size / us / 1e3 / READ_GB_S
                print(f"{f'{model.name} {name} x{rows}':<48}{torch_us:>10.1f}{us:>9.1f}{share:>9.0%}")
                results.append(
                    {"kernel": name, "model": model.name, "rows": rows, "us": us, "torch_us": torch_us, "share": share}
                )


def layer_step(model: Model, rows: int, count: int) -> Callable[[], object]:
    """All of `count` layers but attention, which only hands on the query."""
    shapes = model.linears()
    names = ("qkv", "o", "gate_up", "down")
    weights = [
        {
            name: torch.randn(shapes[name][0] * (2 if shapes[name][2] else 1), shapes[name][1], device="cuda").to(DTYPE)
            / shapes[name][1] ** 0.5
            for name in names
        }
        for _ in range(count)
    ]
    norm = torch.ones(model.hidden, dtype=DTYPE, device="cuda")
    head_norm = (torch.ones(model.head, dtype=DTYPE, device="cuda"), 1e-6)
    norms = (head_norm, head_norm) if model.qk_norm else None
    rope = (torch.ones(rows, model.head, dtype=DTYPE, device="cuda"),) * 2
    cache = torch.zeros(max(8, rows // 8), 2, 16, model.kv_heads, model.head, dtype=DTYPE, device="cuda")
    target = KVTarget(cache[:, 0], cache[:, 1], torch.arange(rows, device="cuda"))
    start = torch.randn(rows, model.hidden, dtype=DTYPE, device="cuda")

    def step() -> torch.Tensor:
        scale = norm, 1e-6
        qkv, residual = device.norm_linear(start, None, scale, weights[0]["qkv"])
        for layer, following in zip(weights, [*weights[1:], None], strict=True):
            query, _, _ = device.attention_inputs(qkv, model.heads, model.head, rope, norms, target)
            attended = query.view(rows, -1)
            inner, residual = device.linear_norm_linear(
                attended, layer["o"], residual, scale, layer["gate_up"], None, "silu"
            )
            if following is not None:
                qkv, residual = device.linear_norm_linear(inner, layer["down"], residual, scale, following["qkv"])
        return device.linear_norm(inner, layer["down"], scale, residual)

    return step


def bench_layer(results: list[dict], fused: set) -> None:
    """Layers without attention as they follow each other, with the choices of this run."""
    print(f"\n{'layers without attention, us a layer':<40}{'plain':>9}{'norm in':>9}{'dependent':>11}{'both':>9}")
    for model in MODELS:
        count = min(model.layers, 12)
        step = layer_step(model, 1, count)
        times = []
        for dependent in (False, True):
            for norms in (frozenset(), frozenset(fused)):
                launch.set_dependent(dependent)
                choices.FUSED_NORM_MEASURED = norms
                try:
                    times.append(time_us([step]) / count)
                except Exception as error:
                    print(f"    dependent={dependent}: {type(error).__name__}: {str(error)[:300]}")
                    times.append(float("nan"))
        launch.set_dependent(False)
        choices.FUSED_NORM_MEASURED = frozenset(fused)
        print(f"{model.name:<40}{times[0]:>9.1f}{times[1]:>9.1f}{times[2]:>11.1f}{times[3]:>9.1f}")
        results.append({"kernel": "layer", "model": model.name, "plain, norm in, dependent, both": times})


def bench_quantized(arguments: argparse.Namespace, results: list[dict]) -> None:
    """Weights of packed integers (w4a16), or of 8 bits in blocks (fp8-blocks)."""
    from benchmarks import gpu_eight_bits, gpu_packed  # deferred: they take their timer from here

    script = gpu_packed if arguments.only == "w4a16" else gpu_eight_bits
    rows = script.ROWS if arguments.rows is None else tuple(map(int, arguments.rows.split(",")))
    with torch.inference_mode():
        script.run(results, swept=arguments.sweep, workers=arguments.workers, rows=rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("linear", "skinny", "small", "layer", "sampling", "w4a16", "fp8-blocks"))
    parser.add_argument("--sweep", action="store_true", help="of w4a16 and fp8-blocks: try all tiles")
    parser.add_argument("--rows", help="of these: numbers of rows, with commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=14)
    arguments = parser.parse_args()
    started, results = time.perf_counter(), []
    measured: dict[choices.Shape, choices.GemvChoice] = {}
    skinny_measured: dict[tuple[int, choices.Shape], tuple[object, bool]] = {}
    fused: set[choices.Shape] = set()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    if arguments.only in ("w4a16", "fp8-blocks"):
        bench_quantized(arguments, results)
        return
    if arguments.only not in ("small", "skinny", "sampling"):
        compile_all(tasks_of(arguments.only), arguments.workers)
    with torch.inference_mode():
        if arguments.only in (None, "linear", "layer"):
            bench_linear(results, measured, fused)
            choices.GEMV_MEASURED.update(measured)
        if arguments.only in (None, "layer"):
            bench_layer(results, fused)
        if arguments.only in (None, "small"):
            bench_small(results)
            bench_many(results)
        if arguments.only in (None, "sampling"):
            bench_sampling(results)
        if arguments.only in (None, "skinny"):
            bench_skinny(results, skinny_measured, arguments.workers)
            bench_few_layers(results, skinny_measured)
    print("\n# choices.py\nGEMV_MEASURED = {")
    print("".join(f"    {shape}: {choice},\n" for shape, choice in measured.items()) + "}\nSKINNY_MEASURED = {")
    print("".join(f"    {key}: {choice},\n" for key, (choice, wins) in skinny_measured.items() if wins) + "}")
    print(
        "".join(
            f"# cuBLAS is faster than {choice} for {key}\n"
            for key, (choice, wins) in skinny_measured.items()
            if not wins
        )
    )
    print(f"FUSED_NORM_MEASURED = frozenset({sorted(fused)})")
    print(f"{time.perf_counter() - started:.0f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
