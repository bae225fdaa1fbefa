"""Time of the GPU kernels of mixtures of experts and of 8-bit floats, in captured graphs with cold weights.

    PYTHONPATH=. python benchmarks/gpu_moe.py [--only few|grouped|fp8|fp8-linear|mla] [--tune] [--json FILE]
                                              [--workers 14]

Shapes of Qwen3-30B-A3B, and of Qwen3-8B for linear layers in 8 bits. Without --tune the choices of moe_choices.py and
fp8_choices.py are timed; with it, every candidate. Kernels are compiled by several processes first. Knows one GPU.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_kernels import DTYPE, READ_GB_S, attempt
from pagemill.model.kernels.fp8 import quantize
from pagemill.model.kernels.moe import SILU, reference_route
from pagemill.model.kernels.routing import Routing
from pagemill.model.kernels.triton import fp8, moe, moe_choices
from pagemill.model.kernels.triton.fp8_choices import (
    FEW_ROWS_CANDIDATES,
    ONE_ROW_CANDIDATES,
    few_rows_choice,
    one_row_choice,
)
from pagemill.model.kernels.triton.fp8_rows import few_rows
from pagemill.model.kernels.triton.gated import gated
from pagemill.model.kernels.triton.gemv import gemv
from pagemill.model.kernels.triton.mla import attend_latents
from pagemill.model.kernels.triton.moe_choices import FewChoice, GroupedChoice, OneSumChoice
from pagemill.model.kernels.triton.moe_few import few_down, few_gate_up
from pagemill.model.kernels.triton.moe_grouped import combine, grouped_down, grouped_gate_up
from pagemill.model.kernels.triton.moe_one_sum import down_one_sum, gate_up_one_sum
from pagemill.model.kernels.triton.moe_sort import sort_slots
from pagemill.model.kernels.triton.norm import rms_norm, rms_norm_floats

SIZE, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
FEW_TOKENS = (1, 2, 4, 8)
MANY_TOKENS = {
    8: (16,), 16: (16,), 32: (16,), 64: (16,), 128: (16, 32), 256: (16, 32, 64), 512: (32, 64), 2048: (64, 128),
    8192: (128,),
}  # fmt: skip
"""Tokens -> heights of tiles to try."""
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
FEW_ROWS = (2, 8, 16, 32, 64)
NUM_CALLS = 12


@dataclass
class Layer:
    """The experts of one layer, and tokens for it: other ones for each call, so that other experts are read."""

    gate_up: torch.Tensor
    down: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def make(cls, eight_bits: bool) -> "Layer":
        """Random weights."""
        gate_up = torch.randn(EXPERTS, 2 * INNER, SIZE, dtype=DTYPE, device="cuda") / SIZE**0.5
        down = torch.randn(EXPERTS, SIZE, INNER, dtype=DTYPE, device="cuda") / INNER**0.5
        if not eight_bits:
            return cls(gate_up, down)
        packed = [quantize(weight.view(-1, weight.shape[2])) for weight in (gate_up, down)]
        floats = [part[0].view(weight.shape) for part, weight in zip(packed, (gate_up, down), strict=True)]
        return cls(floats[0], floats[1], (packed[0][1].view(EXPERTS, -1), packed[1][1].view(EXPERTS, -1)))

    def read_bytes(self, chosen: list[torch.Tensor]) -> float:
        """Of the weights of the experts that a call chooses, on average."""
        each = (self.gate_up[0].numel() + self.down[0].numel()) * self.gate_up.element_size()
        return each * sum(len(ids.unique()) for ids in chosen) / len(chosen)


def routed(num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens, experts, weights) of some calls."""
    routing, calls = Routing(TOP_K, renormalize=True), []
    for _ in range(NUM_CALLS):
        x = torch.randn(num_tokens, SIZE, dtype=DTYPE, device="cuda")
        calls.append((x, *reference_route(torch.randn(num_tokens, EXPERTS, device="cuda"), routing)))
    return calls


# --- compiling ahead ----------------------------------------------------------------------------------------------


def compile_one(task: tuple[str, Any, bool]) -> str | None:
    """Run a kernel once in a process of its own, so that Triton's cache has it. The reason, where it does not run."""
    kind, choice, eight_bits = task
    try:
        run_once(kind, choice, eight_bits)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{kind} {choice}: {type(error).__name__}: {str(error)[:160]}"
    return None


def run_once(kind: str, choice: Any, eight_bits: bool) -> None:
    """One call on small inputs of the real widths."""
    dtype = torch.float8_e4m3fn if eight_bits else DTYPE
    if kind in ("few_gate_up", "few_down", "gate_up", "down", "one_sum_gate_up", "one_sum_down"):
        gate_up = torch.zeros(EXPERTS, 2 * INNER, SIZE, dtype=dtype, device="cuda")
        down = torch.zeros(EXPERTS, SIZE, INNER, dtype=dtype, device="cuda")
        scales = (torch.ones(EXPERTS, 2 * INNER, device="cuda"), torch.ones(EXPERTS, SIZE, device="cuda"))
        first, second = scales if eight_bits else (None, None)
        chosen = torch.arange(TOP_K, dtype=torch.int32, device="cuda").expand(16, TOP_K).contiguous()
        weights, x = torch.ones(16, TOP_K, device="cuda"), torch.zeros(16, SIZE, dtype=DTYPE, device="cuda")
        inner = torch.zeros(16 * TOP_K, INNER, dtype=DTYPE, device="cuda")
        if kind == "few_gate_up":
            few_gate_up(x, gate_up, chosen, 0, SILU, choice, first)
        elif kind == "few_down":
            few_down(inner, down, chosen, weights, 0, choice, second)
        elif kind == "one_sum_gate_up":
            gate_up_one_sum(x, gate_up, chosen, 0, SILU, choice)
        elif kind == "one_sum_down":
            down_one_sum(inner, down, chosen, weights, 0, choice, SILU)
        else:
            order = sort_slots(chosen, 0, EXPERTS, choice.block_m)
            if kind == "gate_up":
                grouped_gate_up(x, gate_up, order, TOP_K, SILU, choice, first)
            else:
                grouped_down(inner, down, order, choice, second)
        return
    outputs, inputs = LINEARS[kind.partition(" ")[2]]
    weight, factors = torch.zeros(outputs, inputs, dtype=dtype, device="cuda"), torch.ones(outputs, device="cuda")
    gate = "silu" if kind.endswith("gate_up") else None
    if kind.startswith("one"):
        gemv(torch.zeros(1, inputs, dtype=DTYPE, device="cuda"), weight, choice, gate=gate, factors=factors)
    else:
        for rows in (16, 32):
            few_rows(torch.zeros(rows, inputs, dtype=DTYPE, device="cuda"), weight, factors, None, gate, choice)


def compile_all(tasks: list[tuple[str, Any, bool]], workers: int) -> None:
    """Fill Triton's cache."""
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        failures = [failure for failure in pool.map(compile_one, tasks, chunksize=2) if failure]
    print(f"compiled {len(tasks)} kernels in {time.perf_counter() - started:.1f} s, {len(failures)} cannot be")
    for failure in failures[:8]:
        print("   ", failure)


def grouped_candidates(block_m: int, tune: bool, num_tokens: int) -> list[GroupedChoice]:
    """Tiles of a height; without tuning none but those of the rules."""
    if not tune:
        return [
            choice for choice in moe_choices.grouped_choices(num_tokens * TOP_K, EXPERTS) if choice.block_m == block_m
        ]
    tiles = moe_choices.GROUPED_CANDIDATES[block_m]
    return [GroupedChoice(block_m, *tile, swap) for tile in tiles for swap in (False, True)]


def one_sum_candidates(tune: bool) -> tuple[list[OneSumChoice], list[OneSumChoice]]:
    """Of both layers."""
    rules = [moe_choices.one_sum_choices(tokens) for tokens in FEW_TOKENS]
    tried = moe_choices.ONE_SUM_CANDIDATES if tune else ((), ())
    first, second = ({*rule, *more} for rule, more in zip(zip(*rules, strict=True), tried, strict=True))
    return sorted(first, key=repr), sorted(second, key=repr)


def tasks_of(only: str | None, tune: bool) -> list[tuple[str, Any, bool]]:
    """Everything that will be timed, once."""
    tasks: set[tuple[str, Any, bool]] = set()
    for eight_bits in (False, True) if only in (None, "fp8") else (False,):
        if only in (None, "few", "fp8"):
            few = moe_choices.FEW_CANDIDATES if tune else ()
            tasks |= {("few_gate_up", choice, eight_bits) for choice in (*few, moe_choices.FEW_GATE_UP)}
            tasks |= {("few_down", choice, eight_bits) for choice in (*few, moe_choices.FEW_DOWN)}
        if only in (None, "few") and not eight_bits:
            first, second = one_sum_candidates(tune)
            tasks |= {("one_sum_gate_up", choice, False) for choice in first}
            tasks |= {("one_sum_down", choice, False) for choice in second}
        if only in (None, "grouped", "fp8"):
            for tokens, heights in MANY_TOKENS.items():
                for block_m in heights:
                    for choice in grouped_candidates(block_m, tune, tokens):
                        tasks |= {("gate_up", choice, eight_bits), ("down", choice, eight_bits)}
    if only in (None, "fp8", "fp8-linear"):
        for name, (outputs, inputs) in LINEARS.items():
            gated = name == "gate_up"
            one = one_row_choice(outputs // 2 if gated else outputs, inputs, gated)
            tasks |= {(f"one {name}", choice, True) for choice in ((*ONE_ROW_CANDIDATES, one) if tune else (one,))}
            several = few_rows_choice(outputs, inputs)
            some = (*FEW_ROWS_CANDIDATES, several) if tune else (several,)
            tasks |= {(f"few {name}", choice, True) for choice in some}
    return sorted(tasks, key=repr)


# --- experts ------------------------------------------------------------------------------------------------------


def report(results: list[dict[str, Any]], name: str, us: float, read_bytes: float, **facts: Any) -> None:
    """One line, and one entry."""
    speed = read_bytes / us / 1e3
    print(f"{name:<44}{us:>9.1f} us {speed:>7.0f} GB/s {speed / READ_GB_S:>5.0%}  {facts.get('choice', '')}")
    results.append({"name": name, "us": us, "gb_s": speed} | {key: repr(value) for key, value in facts.items()})


def best_of(choices: list[Any], time_of: Callable[[Any], float], label: str, tune: bool) -> tuple[Any, float]:
    """The fastest choice; all of them are listed when tuning."""
    times = {choice: time_of(choice) for choice in choices}
    best = min(times, key=lambda choice: times[choice])
    if tune:
        shown = sorted(times.items(), key=lambda item: item[1])[:3]
        print(f"    {label}: " + "; ".join(f"{us:.1f} {choice}" for choice, us in shown))
    return best, times[best]


def bench_few(layer: Layer, results: list[dict[str, Any]], tune: bool) -> None:
    """Slot by slot, for few tokens."""
    scales = layer.scales or (None, None)
    label = "8 bits" if layer.scales else "bf16"
    candidates = list(moe_choices.FEW_CANDIDATES) if tune else []
    for tokens in FEW_TOKENS:
        calls = routed(tokens)
        inner = torch.randn(tokens * TOP_K, INNER, dtype=DTYPE, device="cuda")

        def gate_up(choice: FewChoice, calls: Any = calls) -> float:
            return attempt(
                [
                    lambda x=x, ids=ids: few_gate_up(x, layer.gate_up, ids, 0, SILU, choice, scales[0])
                    for x, ids, _ in calls
                ]
            )

        def down(choice: FewChoice, calls: Any = calls, inner: Any = inner) -> float:
            return attempt(
                [lambda ids=ids, w=w: few_down(inner, layer.down, ids, w, 0, choice, scales[1]) for _, ids, w in calls]
            )

        first, first_us = best_of([*candidates, moe_choices.FEW_GATE_UP], gate_up, "gate_up", tune)
        second, second_us = best_of([*candidates, moe_choices.FEW_DOWN], down, "down", tune)
        read = layer.read_bytes([ids for _, ids, _ in calls])
        report(results, f"few {label} x{tokens}", first_us + second_us, read, choice=(first, second))


def bench_one_sum(layer: Layer, results: list[dict[str, Any]], tune: bool) -> None:
    """The same in the order of the grouped kernels; the whole of both ways too."""
    for tokens in FEW_TOKENS:
        calls = routed(tokens)
        inner = torch.randn(tokens * TOP_K, INNER, dtype=DTYPE, device="cuda")

        def gate_up(choice: OneSumChoice, calls: Any = calls) -> float:
            return attempt([lambda x=x, ids=ids: gate_up_one_sum(x, layer.gate_up, ids, 0, SILU, choice)
                            for x, ids, _ in calls])  # fmt: skip

        def down(choice: OneSumChoice, calls: Any = calls, inner: Any = inner) -> float:
            return attempt([lambda ids=ids, w=w: down_one_sum(inner, layer.down, ids, w, 0, choice, SILU)
                            for _, ids, w in calls])  # fmt: skip

        candidates = one_sum_candidates(True) if tune else [[choice] for choice in moe_choices.one_sum_choices(tokens)]
        first, first_us = best_of(candidates[0], gate_up, "gate_up", tune)
        second, second_us = best_of(candidates[1], down, "down", tune)
        read = layer.read_bytes([ids for _, ids, _ in calls])
        report(results, f"one sum bf16 x{tokens}", first_us + second_us, read, choice=(first, second))
        for name, kernel in (("few", moe.few), ("one sum", moe.few_one_sum)):
            whole = attempt([lambda x=x, ids=ids, w=w, kernel=kernel: kernel(x, layer.gate_up, layer.down, ids, w, 0)
                             for x, ids, w in calls])  # fmt: skip
            report(results, f"{name} bf16 x{tokens} whole", whole, read)


def bench_grouped(layer: Layer, results: list[dict[str, Any]], tune: bool) -> None:
    """Expert by expert, for many tokens; and torch's grouped product."""
    scales = layer.scales or (None, None)
    label = "8 bits" if layer.scales else "bf16"
    for tokens, heights in MANY_TOKENS.items():
        calls = routed(tokens)
        read = layer.read_bytes([ids for _, ids, _ in calls])
        for block_m in heights:
            candidates = grouped_candidates(block_m, tune, tokens)
            if not candidates:
                continue
            orders = [sort_slots(ids, 0, EXPERTS, block_m) for _, ids, _ in calls]
            inner = torch.randn(tokens * TOP_K, INNER, dtype=DTYPE, device="cuda")
            pairs = list(zip(calls, orders, strict=True))

            def gate_up(choice: GroupedChoice, pairs: Any = pairs) -> float:
                return attempt(
                    [
                        lambda x=x, order=order: grouped_gate_up(
                            x, layer.gate_up, order, TOP_K, SILU, choice, scales[0]
                        )
                        for (x, _, _), order in pairs
                    ]
                )

            def down(choice: GroupedChoice, orders: Any = orders, inner: Any = inner) -> float:
                return attempt(
                    [lambda order=order: grouped_down(inner, layer.down, order, choice, scales[1]) for order in orders]
                )

            first, first_us = best_of(candidates, gate_up, f"x{tokens} m{block_m} gate_up", tune)
            second, second_us = best_of(candidates, down, f"x{tokens} m{block_m} down", tune)

            def whole(pair: Any, calls: Any = calls) -> float:
                return attempt(
                    [
                        lambda x=x, ids=ids, w=w: moe.grouped(
                            x, layer.gate_up, layer.down, (ids, w), 0, SILU, pair, layer.scales
                        )
                        for x, ids, w in calls
                    ]
                )

            name = f"grouped {label} x{tokens} m{block_m}"
            report(results, name, first_us + second_us, read, choice=(first, second))
            report(results, f"{name} whole", whole((first, second)), read)
        if layer.scales is None:
            by_torch = attempt([lambda call=call: torch_grouped(layer, *call) for call in calls])
            report(results, f"torch grouped_mm x{tokens} whole", by_torch, read)


def torch_grouped(layer: Layer, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same with torch's product of groups, sorting and adding up as ours."""
    order = sort_slots(chosen, 0, EXPERTS, 128)
    counts = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")
    ends = counts.index_add_(0, chosen.view(-1), torch.ones_like(chosen.view(-1))).cumsum(0, dtype=torch.int32)
    rows = x.index_select(0, order.slots // TOP_K)
    both = torch._grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, -1)
    done = torch._grouped_mm(torch.nn.functional.silu(gate) * up, layer.down.transpose(1, 2), offs=ends)
    parts = torch.empty_like(done).index_copy_(0, order.slots.long(), done)
    return combine(parts, chosen, weights, 0, EXPERTS)


# --- linear layers in 8 bits, latent attention ----------------------------------------------------------------------


def bench_fp8_linears(results: list[dict[str, Any]], tune: bool) -> None:
    """Qwen3-8B's layers: one row, a few, and where the 8-bit product of the library takes over."""
    for name, (outputs, inputs) in LINEARS.items():
        gate = "silu" if name == "gate_up" else None
        count = max(2, -(-(160 << 20) // (outputs * inputs)))
        weights = [quantize(torch.randn(outputs, inputs, dtype=DTYPE, device="cuda")) for _ in range(count)]
        x = torch.randn(1, inputs, dtype=DTYPE, device="cuda")

        def one(choice: Any, x: Any = x, weights: Any = weights, gate: Any = gate) -> float:
            return attempt([lambda w=w, f=f: gemv(x, w, choice, gate=gate, factors=f) for w, f in weights * 2])

        rule = one_row_choice(outputs // 2 if gate else outputs, inputs, gate is not None)
        best, us = best_of([*ONE_ROW_CANDIDATES, rule] if tune else [rule], one, f"{name} one row", tune)
        report(results, f"fp8 {name} x1", us, outputs * inputs, choice=best)
        for rows in FEW_ROWS:
            x = torch.randn(rows, inputs, dtype=DTYPE, device="cuda")
            library = attempt([lambda w=w, f=f: fp8.product(fp8.quantize(x), w, f) for w, f in weights * 2])  # noqa: B023
            report(results, f"fp8 {name} x{rows} scaled_mm", library, outputs * inputs)
            if rows > 32:
                continue

            def several(choice: Any, x: Any = x, weights: Any = weights, gate: Any = gate) -> float:
                return attempt([lambda w=w, f=f: few_rows(x, w, f, None, gate, choice) for w, f in weights * 2])

            rule = few_rows_choice(outputs, inputs)
            choices = [*FEW_ROWS_CANDIDATES, rule] if tune else [rule]
            best, us = best_of(choices, several, f"{name} x{rows}", tune)
            report(results, f"fp8 {name} x{rows}", us, outputs * inputs, choice=best)


def bench_fp8_inputs(results: list[dict[str, Any]]) -> None:
    """What quantizes rows for Qwen3-8B's layers: in a kernel of its own, and in the norm or activation before it."""
    size, inner = LINEARS["gate_up"][1], LINEARS["down"][1]
    weight = torch.randn(size, dtype=DTYPE, device="cuda")
    for rows in (64, 256, 8192):
        x = [torch.randn(rows, size, dtype=DTYPE, device="cuda") for _ in range(4)]
        residual = torch.randn(rows, size, dtype=DTYPE, device="cuda")
        both = [torch.randn(rows, 2 * inner, dtype=DTYPE, device="cuda") for _ in range(4)]
        timed: dict[str, tuple[list[Callable[[], object]], int]] = {
            "norm, quantize": ([lambda a=a: fp8.quantize(rms_norm(a, weight, 1e-6, residual)) for a in x], 11 * size),  # noqa: B023
            "norm with floats": ([lambda a=a: rms_norm_floats(a, weight, 1e-6, residual) for a in x], 7 * size),  # noqa: B023
            "silu, quantize": ([lambda a=a: fp8.quantize(gated(a, False)) for a in both], 9 * inner),
            "silu with floats": ([lambda a=a: fp8.quantize(a, "silu") for a in both], 5 * inner),
            "quantize": ([lambda a=a: fp8.quantize(a) for a in x], 3 * size),
        }
        for name, (calls, row_bytes) in timed.items():
            report(results, f"fp8 x{rows} {name}", attempt(calls * 4), rows * row_bytes)


def bench_mla(results: list[dict[str, Any]]) -> None:
    """Decoding over latent vectors, 16 heads (V2-Lite) and 128 (V3)."""
    for heads in (16, 128):
        for requests, length in ((1, 1024), (1, 8192), (32, 1024), (32, 8192), (128, 1024)):
            blocks = length // 64
            cache = torch.randn(1 + requests * blocks, 64, 576, dtype=DTYPE, device="cuda")
            table = (torch.randperm(requests * blocks, device="cuda") + 1).view(requests, blocks).int()
            query = torch.randn(requests, heads, 576, dtype=DTYPE, device="cuda")
            rows = torch.arange(requests, dtype=torch.int32, device="cuda")
            seen = torch.full((requests,), length, dtype=torch.int32, device="cuda")
            splits = min(64, max(1, 264 // (requests * -(-heads // 64))))
            us = attempt([lambda: attend_latents(query, cache, table, rows, seen, 0.1, 512, splits)] * NUM_CALLS)  # noqa: B023
            report(results, f"mla {heads} heads {requests} x {length}", us, requests * length * 576 * 2)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("few", "grouped", "fp8", "fp8-linear", "mla"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    if args.only != "mla":
        compile_all(tasks_of(args.only, args.tune), args.workers)
    if args.only in (None, "few", "grouped"):
        layer = Layer.make(eight_bits=False)
        if args.only != "grouped":
            bench_few(layer, results, args.tune)
            bench_one_sum(layer, results, args.tune)
        if args.only != "few":
            bench_grouped(layer, results, args.tune)
        del layer
    if args.only in (None, "fp8", "fp8-linear"):
        bench_fp8_linears(results, args.tune)
        bench_fp8_inputs(results)
    if args.only in (None, "fp8"):
        layer = Layer.make(eight_bits=True)
        bench_few(layer, results, args.tune)
        bench_grouped(layer, results, args.tune)
        del layer
    if args.only in (None, "mla"):
        bench_mla(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
