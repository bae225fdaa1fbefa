"""Prompts over latent vectors, one layer of DeepSeek-V2-Lite (16 heads) and V3 (128), in captured graphs.

    PYTHONPATH=. python benchmarks/gpu_mla.py [--only check|layer|kernel|steady|few|weights|model] [--json FILE]

`check` compares with attention by definition; `layer` is all from queries and latent vectors to values, with keys and
values of their own for each head by the kernel for Hopper GPUs and by the one for all, and by queries in the latent
space; `kernel` is attention alone; `steady` the same for half a second at a time, at the clock that the GPU's power
allows, with several limits to what programs read at the same time (--shares, MB; 1000: all heads); `few` finds from how
many tokens on keys and values are made; `weights` times the two products of decoding by how their matrix lies in
memory; `model` is all of DeepSeek-V2-Lite. Knows one GPU.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_attention import graph_us
from benchmarks.latent_case import LatentCase, LatentShape
from pagemill.model.attention.backends import latent_prompts
from pagemill.model.attention.backends.triton_mla import TritonMlaBackend
from pagemill.model.kernels import gpu_facts
from pagemill.model.kernels.triton import launch, mla_prompts, mla_prompts_hopper

DEVICE = "cuda"
TOLERANCE = 1e-2
HEADS = (16, 128)


@dataclass(frozen=True)
class Work:
    """`batch` requests of `context` tokens, of which the last `query` are new."""

    batch: int
    context: int
    query: int

    def __str__(self) -> str:
        after = self.context - self.query
        return f"{self.batch} x {self.query}" + (f" after {after}" if after else "")


WORKS = [
    Work(16, 512, 512), Work(8, 1024, 1024), Work(1, 2048, 2048), Work(1, 8192, 8192), Work(4, 8704, 512),
    Work(3, 1037, 333), Work(1, 34816, 2048),
]  # fmt: skip
FEW = [Work(4, context + query, query) for context in (0, 1024, 8192) for query in (32, 64, 96, 128, 192, 256)]
CHECKED: list[tuple[str, int, list[tuple[int, int]], int]] = [
    ("prompts", 16, [(300, 300), (1024, 1024), (513, 513), (128, 128)], 256 << 20),
    ("mixed", 16, [(300, 300), (1, 700), (513, 1290), (133, 1000), (3, 40), (257, 4096)], 256 << 20),
    ("128 heads", 128, [(700, 700), (1, 700), (260, 900)], 256 << 20),
    ("some heads at a time", 16, [(300, 300), (1, 700), (513, 1290), (700, 1000)], 12 << 20),
    ("some keys at a time", 16, [(300, 300), (1, 700), (513, 3290), (700, 3000), (1024, 5000)], 32 << 20),
]


def shape_of(heads: int) -> LatentShape:
    """A layer's."""
    return LatentShape(heads, 64, 128, 128, 512)


def flops(work: Work, heads: int) -> int:
    """Of attention with keys of 192 and values of 128, without what the mask hides."""
    seen = work.query * work.context - work.query * (work.query - 1) // 2
    return 2 * 320 * work.batch * heads * seen


class Layer:
    """One layer, and a step."""

    def __init__(self, work: Work, heads: int) -> None:
        requests = [(work.query, work.context)] * work.batch
        self.case = LatentCase(shape_of(heads), requests, torch.bfloat16, DEVICE)
        spec = self.case.shape.spec
        self.impl = TritonMlaBackend.impl(spec)
        builder = TritonMlaBackend.metadata_builder(spec, torch.device(DEVICE))
        with patch.object(latent_prompts, "TOKENS_PER_KEY", 1):
            self.expanded = builder.build(self.case.common)
        self.absorbed = builder.build(replace(self.case.common, batch_lens=None))

    def run(self, metadata: Any) -> Tensor:
        """As the model does."""
        case = self.case
        return self.impl.attend_latents(case.query, case.kept, case.cache, metadata, case.weights)


def error(result: Tensor, expected: Tensor) -> float:
    """Relative."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def check() -> list[dict[str, Any]]:
    """Every kernel against the definition."""
    rows = []
    for name, heads, requests, room in CHECKED:
        case = LatentCase(shape_of(heads), requests, torch.bfloat16, DEVICE, padding=5)
        builder = TritonMlaBackend.metadata_builder(case.shape.spec, torch.device(DEVICE), room)
        expected = case.expected(torch.float32)
        found = {"Hopper": case.run(TritonMlaBackend, builder)}
        with patch.object(mla_prompts_hopper, "takes", return_value=False):
            found["all"] = case.run(TritonMlaBackend, builder)
        case.common = replace(case.common, batch_lens=None)
        found["absorbed"] = case.run(TritonMlaBackend, builder)
        for kernel, result in found.items():
            wrong = error(result[: len(expected)], expected)
            finite = bool(result.isfinite().all())
            worst = float((result[: len(expected)].float() - expected).abs().max() / expected.abs().max())
            said = "" if wrong < TOLERANCE and finite else "  WRONG"
            print(f"check {name:24} {kernel:10} error {wrong:.1e} worst {worst:.1e}{said}", flush=True)
            rows.append({"check": name, "kernel": kernel, "error": wrong, "finite": finite})
    return rows


def layer() -> list[dict[str, Any]]:
    """All of a layer's attention."""
    return [_layer(heads, work) for heads in HEADS for work in WORKS]


def _layer(heads: int, work: Work) -> dict[str, Any]:
    made = Layer(work, heads)
    times = {"Hopper": graph_us(lambda: made.run(made.expanded))}
    with patch.object(mla_prompts_hopper, "takes", return_value=False):
        times["all GPUs"] = graph_us(lambda: made.run(made.expanded), 3)
    times["absorbed"] = graph_us(lambda: made.run(made.absorbed), 3)
    said = "  ".join(f"{name} {us:8.1f} us {flops(work, heads) / us / 1e6:5.0f}" for name, us in times.items())
    print(f"layer {heads:3} heads {work!s:20} {said} TFLOP/s", flush=True)
    return {"heads": heads, "work": asdict(work), "us": times}


def kernel() -> list[dict[str, Any]]:
    """Attention alone, what comes before it, and what the way to carry sums on costs where nothing is carried."""
    return [_kernel(heads, work) for heads in HEADS for work in WORKS]


def _kernel(heads: int, work: Work) -> dict[str, Any]:
    made = Layer(work, heads)
    case = made.case
    sizes = latent_prompts.sizes_of(case.weights, case.cache)
    steps = made.expanded.prompts.passes(sizes)
    step = steps[0]
    keys, expanded, sums, totals = made.expanded.workspace.parts(step, sizes, torch.bfloat16)
    out = torch.empty(len(case.query), heads, 128, dtype=torch.bfloat16, device=DEVICE)
    spare = torch.empty(2, len(case.query), step.heads, 128, dtype=torch.float32, device=DEVICE)
    carried = mla_prompts.Carried(sums, totals, step.carried_token) if step.num_carried else None
    unused = carried or mla_prompts.Carried(spare[0], spare[1], 0)
    tiles = mla_prompts.Tiles(step.records, step.counter)
    given = (out, case.query, keys, expanded, tiles, case.shape.spec.scale, step.first_head)
    times = {
        "gather": graph_us(lambda: mla_prompts.gather(keys, case.cache, case.common.block_table, step.pieces)),
        "make": graph_us(lambda: case.weights.make(keys, expanded, step.first_head)),
        "Hopper": graph_us(lambda: mla_prompts_hopper.attend(*given, carried)),
        "may carry": graph_us(lambda: mla_prompts_hopper.attend(*given, unused)),
        "all": graph_us(lambda: mla_prompts.attend(*given, carried), 3),
    }
    share = step.heads / heads if not step.num_carried else 0
    tflops = {name: flops(work, heads) * share / times[name] / 1e6 for name in ("Hopper", "may carry", "all")}
    print(
        f"kernel {heads:3} heads {work!s:20} 1 of {len(steps)} passes, {step.heads} heads, us: "
        + "  ".join(f"{name} {us:7.1f}" for name, us in times.items())
        + "  TFLOP/s "
        + "  ".join(f"{name} {value:4.0f}" for name, value in tflops.items()),
        flush=True,
    )
    return {"heads": heads, "work": asdict(work), "us": times, "tflops": tflops}


def steady(shares: Sequence[int]) -> list[dict[str, Any]]:
    """Attention alone, of all passes; without `shares` as the kernel chooses."""
    return [_steady(heads, work, shares) for heads in HEADS for work in WORKS]


def _steady(heads: int, work: Work, shares: Sequence[int]) -> dict[str, Any]:
    made = Layer(work, heads)
    made.run(made.expanded)
    case, plan = made.case, made.expanded
    out = torch.empty(len(case.query), heads, 128, dtype=torch.bfloat16, device=DEVICE)

    def attend() -> None:
        latent_prompts.attend(
            out, case.query, case.cache, case.common.block_table, case.shape.spec.scale, case.weights, plan.prompts,
            plan.workspace,
        )  # fmt: skip

    times = {}
    # What it reads is what the run above has left there.
    with patch.object(mla_prompts, "gather"), patch.object(type(case.weights), "make"):
        if not shares:
            times["as chosen"] = steady_us(attend)
        for share in shares:
            with patch.object(gpu_facts, "L2_SHARE", share << 20):
                times[f"{share} MB"] = steady_us(attend)
    said = "  ".join(f"{name} {us:8.1f} us {flops(work, heads) / us / 1e6:5.0f}" for name, us in times.items())
    print(f"steady {heads:3} heads {work!s:20} {said} TFLOP/s", flush=True)
    return {"heads": heads, "work": asdict(work), "us": times}


def steady_us(call: Callable[[], object], seconds: float = 0.5) -> float:
    """Microseconds of a call in a captured graph, of as many one after the other as take so long."""
    replays = int(seconds * 1e6 / graph_us(call, 3)) + 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays


def few() -> list[dict[str, Any]]:
    """Few tokens, both ways."""
    return [_few(heads, work) for heads in HEADS for work in FEW]


def _few(heads: int, work: Work) -> dict[str, Any]:
    made = Layer(work, heads)
    times = {
        name: graph_us(lambda plan=plan: made.run(plan), 3)
        for name, plan in (("made", made.expanded), ("absorbed", made.absorbed))
    }
    per_key = work.query * (2 * work.context - work.query) / (2 * work.context)
    print(
        f"few {heads:3} heads {work!s:20} {per_key:5.0f} tokens a key: made {times['made']:7.1f} us, absorbed "
        f"{times['absorbed']:7.1f} us",
        flush=True,
    )
    return {"heads": heads, "work": asdict(work), "per_key": per_key, "us": times}


def weights() -> list[dict[str, Any]]:
    """Absorbing queries and expanding results, with matrices of their own and with parts of one."""
    return [_weights(heads, tokens) for heads in HEADS for tokens in (1, 4, 16, 64, 256)]


def _weights(heads: int, tokens: int) -> dict[str, Any]:
    both = [torch.randn(heads, 256, 512, dtype=torch.bfloat16, device=DEVICE) for _ in range(16)]
    given = {
        "apart": [(one[:, :128].contiguous(), one[:, 128:].transpose(1, 2).contiguous()) for one in both],
        "parts": [(one[:, :128], one[:, 128:].transpose(1, 2)) for one in both],
    }
    query = torch.randn(tokens, heads, 192, dtype=torch.bfloat16, device=DEVICE)[..., 64:].transpose(0, 1)
    found = torch.randn(tokens, heads, 512, dtype=torch.bfloat16, device=DEVICE).transpose(0, 1)
    times = {}
    for name, matrices in given.items():
        times[f"absorb, {name}"] = graph_us(lambda m=matrices: [torch.bmm(query, key) for key, _ in m]) / 16
        times[f"expand, {name}"] = graph_us(lambda m=matrices: [torch.bmm(found, value) for _, value in m]) / 16
    said = "  ".join(f"{name} {us:6.2f}" for name, us in times.items())
    print(f"weights {heads:3} heads {tokens:3} tokens, us: {said}", flush=True)
    return {"heads": heads, "tokens": tokens, "us": times}


def model() -> list[dict[str, Any]]:
    """DeepSeek-V2-Lite with random weights: time of first tokens, both ways in one process, and whether both write the
    same."""
    from pagemill import LLM, SamplingParams

    folder = str(Path(__file__).parent / "configs" / "deepseek-v2-lite")
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=20_480, seed=0,
        enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=1)
    random = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(10, 100_000, (count, length), generator=random).tolist()

    def timed(given: list[list[int]]) -> tuple[float, list[Any]]:
        begin = time.perf_counter()
        done = llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - begin, [each.outputs[0] for each in done]

    rows = []
    for count, length in ((1, 512), (1, 2048), (1, 8192), (1, 16384), (64, 1024), (3, 777)):
        given = prompts(count, length)
        found: dict[str, tuple[float, list[Any]]] = {}
        for name, limit in (("made", latent_prompts.TOKENS_PER_KEY), ("absorbed", 1 << 40)):
            with patch.object(latent_prompts, "TOKENS_PER_KEY", limit):
                timed(prompts(count, length))
                tries = [timed(given) for _ in range(3)]
            found[name] = min(tries, key=lambda each: each[0])
        tokens = [[each.token_ids[0] for each in outputs] for _, outputs in found.values()]
        values = [torch.tensor([each.cumulative_logprob for each in outputs]) for _, outputs in found.values()]
        equal = sum(one == other for one, other in zip(*tokens, strict=True))
        apart = float((values[0] - values[1]).abs().max())
        times = {name: seconds * 1e3 for name, (seconds, _) in found.items()}
        print(
            f"model {count} x {length}: made {times['made']:.1f} ms, absorbed {times['absorbed']:.1f} ms; {equal} of "
            f"{count} tokens equal, logprobs differ by {apart:.4f} at most",
            flush=True,
        )
        rows.append({"count": count, "length": length, "ms": times, "equal": equal, "logprobs": apart})
    return rows


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    part.__name__: part for part in (check, layer, kernel, few, weights, model)
}


def _shares(said: str) -> list[int]:
    return [int(share) for share in said.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted((*PARTS, "steady")))
    parser.add_argument("--shares", type=_shares, default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), f"dependent launch: {launch.dependent()}", flush=True)
    results = {}
    with torch.inference_mode():
        for name, part in (PARTS | {"steady": partial(steady, options.shares)}).items():
            if options.only in (None, name):
                results[name] = part()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
