"""Time of the GPU kernels of experts whose weights are packed integers or 4-bit floats, in captured graphs with cold
weights, beside those of bfloat16.

    PYTHONPATH=. python benchmarks/gpu_packed_experts.py [--tune] [--json FILE] [--workers 14]

Shapes of Qwen3-30B-A3B in groups of 128 and of gpt-oss-20b. Without --tune the rule of moe_choices.py is timed; with
it, every candidate. Kernels are compiled by several processes first. Knows one GPU.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_kernels import DTYPE, READ_GB_S, attempt
from pagemill.model.kernels.moe import SILU, ExpertForm, reference_route
from pagemill.model.kernels.packed import pack
from pagemill.model.kernels.packed_experts import PackedExperts, room
from pagemill.model.kernels.routing import Routing
from pagemill.model.kernels.triton import moe
from pagemill.model.kernels.triton.moe_choices import (
    MAX_FEW_SLOTS,
    PACKED_EXPERTS_CANDIDATES,
    PackedExpertsChoice,
    packed_experts_choices,
)
from pagemill.model.kernels.triton.moe_grouped import combine
from pagemill.model.kernels.triton.moe_packed import product
from pagemill.model.kernels.triton.moe_sort import sort_slots

TOKENS = (1, 4, 8, 32, 128, 512, 2048, 8192)
NUM_CALLS = 8


@dataclass(frozen=True)
class Shape:
    """A layer of experts: one of its kinds of weights and its sizes."""

    name: str
    size: int
    inner: int
    num_experts: int
    top_k: int
    group: int
    halves: bool
    clamped: bool


SHAPES = (
    Shape("qwen3-30b-a3b int4", 2048, 768, 128, 8, 128, halves=False, clamped=False),
    Shape("gpt-oss-20b mxfp4", 2880, 2880, 32, 4, 32, halves=True, clamped=True),
)


def weights_of(shape: Shape, outputs: int, inputs: int) -> PackedExperts:
    """Random words and equal scales."""
    values = torch.ones(outputs, inputs, dtype=torch.float32 if shape.halves else torch.int8, device="cuda")
    scales = torch.full((outputs, -(-inputs // shape.group)), 0.01, device="cuda")
    experts = room(shape.num_experts, pack(values, scales, None, shape.group, 4, halves=shape.halves))
    experts.words.random_()
    experts.scales.copy_(experts.like.scales)
    return experts


def form_of(shape: Shape) -> ExpertForm:
    """With biases, where the model has them."""
    if not shape.clamped:
        return SILU
    biases = [torch.randn(shape.num_experts, n, dtype=DTYPE, device="cuda") for n in (2 * shape.inner, shape.size)]
    return ExpertForm(clamp=(1.702, 7.0), gate_up_bias=biases[0], down_bias=biases[1])


def routed(shape: Shape, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens, experts, weights) of some calls."""
    calls = []
    for _ in range(NUM_CALLS):
        x = torch.randn(num_tokens, shape.size, dtype=DTYPE, device="cuda")
        logits = torch.randn(num_tokens, shape.num_experts, device="cuda")
        calls.append((x, *reference_route(logits, Routing(shape.top_k, renormalize=True))))
    return calls


def candidates(shape: Shape, num_tokens: int, tune: bool) -> list[PackedExpertsChoice]:
    """What is timed for so many tokens; what the rule says comes first."""
    slots = num_tokens * shape.top_k
    rule = packed_experts_choices(slots, shape.num_experts)
    if not tune:
        return list(dict.fromkeys(rule))
    average = 1 if slots <= MAX_FEW_SLOTS else slots / shape.num_experts
    heights = [m for m in PACKED_EXPERTS_CANDIDATES if average / 2 <= m or m == max(PACKED_EXPERTS_CANDIDATES)]
    tried = [PackedExpertsChoice(m, *tile) for m in heights[:2] for tile in PACKED_EXPERTS_CANDIDATES[m]]
    return list(dict.fromkeys([*rule, *tried]))


def both(
    call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights: tuple[PackedExperts, PackedExperts],
    form: ExpertForm,
    choices: tuple[PackedExpertsChoice, PackedExpertsChoice],
) -> torch.Tensor:
    """Both layers, as moe_packed.experts computes them, with the tiles given."""
    x, chosen, shares = call
    num_experts = len(weights[0].words)
    order = sort_slots(chosen, 0, num_experts, choices[0].block_m) if chosen.numel() > MAX_FEW_SLOTS else None
    inner = product(x, weights[0], chosen, order, 0, choices[0], form, gated=True)
    parts = product(inner, weights[1], chosen, order, 0, choices[1], form, gated=False)
    return combine(parts, chosen, shares, 0, num_experts)


def compile_one(task: tuple[Shape, int, PackedExpertsChoice]) -> str | None:
    """Run the kernels once in a process of its own, so that Triton's cache has them; the reason, where one fails."""
    shape, num_tokens, choice = task
    try:
        weights = weights_of(shape, 2 * shape.inner, shape.size), weights_of(shape, shape.size, shape.inner)
        both(routed(shape, num_tokens)[0], weights, form_of(shape), (choice, choice))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{shape.name} {choice}: {type(error).__name__}: {str(error)[:160]}"
    return None


def compile_all(tune: bool, workers: int) -> None:
    """Fill Triton's cache."""
    tasks = {}
    for shape in SHAPES:
        for num_tokens in TOKENS:
            few = num_tokens * shape.top_k <= MAX_FEW_SLOTS
            for choice in candidates(shape, num_tokens, tune):
                tasks[shape, few, choice] = (shape, 1 if few else 32, choice)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        failures = [failure for failure in pool.map(compile_one, tasks.values()) if failure]
    print(f"compiled {len(tasks)} kernels, {len(failures)} cannot be", *failures[:5], sep="\n    ", flush=True)


def layer_us(
    shape: Shape, weight: PackedExperts, form: ExpertForm, calls: list[Any], choice: PackedExpertsChoice, *, gated: bool
) -> float:
    """Microseconds of one of the two layers."""
    timed: list[Callable[[], object]] = []
    for x, chosen, _ in calls:
        few = chosen.numel() <= MAX_FEW_SLOTS
        order = None if few else sort_slots(chosen, 0, shape.num_experts, choice.block_m)
        given = x if gated else torch.randn(chosen.numel(), shape.inner, dtype=DTYPE, device="cuda")
        timed.append(partial(product, given, weight, chosen, order, 0, choice, form, gated=gated))
    return attempt(timed)


def bench(shape: Shape, tune: bool, results: list[dict[str, Any]]) -> None:
    """All numbers of tokens."""
    weights = weights_of(shape, 2 * shape.inner, shape.size), weights_of(shape, shape.size, shape.inner)
    form = form_of(shape)
    plain = [
        torch.randn(shape.num_experts, n, k, dtype=DTYPE, device="cuda") / 32
        for n, k in ((2 * shape.inner, shape.size), (shape.size, shape.inner))
    ]
    for num_tokens in TOKENS:
        calls = routed(shape, num_tokens)
        tried = candidates(shape, num_tokens, tune)
        times = [
            {choice: layer_us(shape, weight, form, calls, choice, gated=gated) for choice in tried}
            for weight, gated in zip(weights, (True, False), strict=True)
        ]
        for name, each in zip(("gate_up", "down"), times, strict=True):
            for choice in sorted(each, key=each.__getitem__)[: 4 if tune else 0]:
                print(f"    {name}: {each[choice]:.1f} us {choice}")
        best, us = best_pair(tried, times, calls, weights, form)
        floats = attempt([partial(moe.experts, c[0], plain[0], plain[1], c[1], c[2], 0, form) for c in calls])
        used = sum(len(ids.unique()) for _, ids, _ in calls) / len(calls)
        read = used * sum(part.words[0].nbytes + part.scales[0].nbytes for part in weights)
        share = read / us / 1e3 / READ_GB_S
        print(
            f"{shape.name} x{num_tokens}: {us:.1f} us, {share:.0%} of reading; bfloat16 {floats:.1f}; {best}",
            flush=True,
        )
        results.append({"shape": shape.name, "tokens": num_tokens, "us": us, "bf16": floats, "best": repr(best)})


def best_pair(
    tried: list[PackedExpertsChoice],
    times: list[dict[PackedExpertsChoice, float]],
    calls: list[Any],
    weights: tuple[PackedExperts, PackedExperts],
    form: ExpertForm,
) -> tuple[tuple[PackedExpertsChoice, PackedExpertsChoice], float]:
    """The choices that are fastest together, of one height, for both share the sorted slots; and their time."""
    found = {}
    for height in {choice.block_m for choice in tried}:
        same = [choice for choice in tried if choice.block_m == height]
        pair = (min(same, key=times[0].__getitem__), min(same, key=times[1].__getitem__))
        found[pair] = attempt([partial(both, call, weights, form, pair) for call in calls])
    best = min(found, key=found.__getitem__)
    return best, found[best]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    torch.manual_seed(0)
    compile_all(args.tune, args.workers)
    results: list[dict[str, Any]] = []
    for shape in SHAPES:
        bench(shape, args.tune, results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
