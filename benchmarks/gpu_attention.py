"""Time of attention over a paged cache, one layer, in captured graphs with cold keys: every backend that is here.

    PYTHONPATH=. python benchmarks/gpu_attention.py [--only decode|few|prefill|tune|verify] [--heads 32,8,128]
        [--json FILE]

`few` is decode of short contexts; `tune` tries the tiles of attention_tiles.py and prints the best of each workload,
`verify` those for steps that verify drafts.
Knows one GPU; under three minutes on an H200. Every result is compared with attention by definition first.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.attention.backends.flash_attn import _with_provider
from pagemill.model.attention.backends.flashinfer import FlashInferBackend
from pagemill.model.attention.backends.triton_attn import TritonBackend, TritonBuilder
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.flash_providers import providers
from pagemill.model.attention.interface import AttentionBackend, BatchLens, CommonAttentionMetadata
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.attention_tiles import CANDIDATES, Tiles, tiles_for

BLOCK = 16
COLD_BYTES = 400 << 20
"""Keys and values that are gone through before one is read again: eight times the L2 cache."""
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
CHECKED_REQUESTS = 2
TOLERANCE = 1.5e-2


@dataclass(frozen=True)
class Work:
    """`batch` requests of `context` tokens, of which the last `query` are new."""

    batch: int
    context: int
    query: int = 1

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}" + (f", {self.query} new" if self.query > 1 else "")


DECODE = [Work(batch, context) for batch in (1, 8, 32, 128, 256) for context in (1024, 8192, 32768)]
FEW = [Work(batch, context) for batch in (8, 16, 32, 48, 64, 128, 256) for context in (640, 1024)] + [Work(1, 8192)]
PREFILL = [
    *(Work(8, 1024, 1024), Work(1, 2048, 2048), Work(1, 8192, 8192), Work(1, 32768, 32768), Work(4, 8192, 512)),
    *(Work(16, 512, 512), Work(3, 1037, 333)),
]
TUNE_DECODE = [Work(1, 1024), Work(1, 8192), Work(8, 8192), Work(32, 8192), Work(256, 1024)]
TUNE_VERIFY = [
    Work(1, 640, 6),
    Work(1, 8192, 6),
    Work(8, 640, 6),
    Work(32, 256, 6),
    Work(32, 640, 6),
    Work(32, 4096, 6),
]
TUNE_PREFILL = [Work(8, 1024, 1024), Work(1, 8192, 8192)]
TUNED = {"decode": TUNE_DECODE, "verify": TUNE_VERIFY, "prefill": TUNE_PREFILL}


@dataclass
class Case:
    """The tensors of a workload."""

    spec: AttentionLayerSpec
    work: Work
    caches: list[Tensor] = field(init=False)
    query: Tensor = field(init=False)
    common: CommonAttentionMetadata = field(init=False)

    def __post_init__(self) -> None:
        spec, work = self.spec, self.work
        pages = -(-work.context // BLOCK)
        layers = max(2, min(32, -(-COLD_BYTES // self.cache_bytes)))
        shape = (work.batch * pages + 1, 2, BLOCK, spec.num_kv_heads, spec.head_size)
        self.caches = [torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_() for _ in range(layers)]
        self.query = torch.randn(work.batch * work.query, spec.num_heads, spec.head_size, dtype=DTYPE, device=DEVICE)
        table = (torch.randperm(work.batch * pages, device=DEVICE) + 1).int().view(work.batch, pages)
        start = torch.arange(work.batch + 1, dtype=torch.int32) * work.query
        lens = torch.full((work.batch,), work.context, dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            start.to(DEVICE), lens.to(DEVICE), table, torch.zeros(0, dtype=torch.int64, device=DEVICE), work.batch,
            work.batch * work.query, work.query, work.context, BLOCK, start, lens,
            batch_lens=BatchLens(start.numpy(), lens.numpy()),
        )  # fmt: skip

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one layer that are read."""
        spec = self.spec
        return 2 * self.work.batch * self.work.context * spec.num_kv_heads * spec.head_size * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Of both products, without what the mask hides."""
        work = self.work
        seen = work.query * work.context - work.query * (work.query - 1) // 2
        return 4 * work.batch * self.spec.num_heads * self.spec.head_size * seen

    def error(self, attended: Tensor) -> float:
        """Relative error of the first requests, on the first layer."""
        work, spec = self.work, self.spec
        wrong, right = 0.0, 0.0
        for row in range(min(CHECKED_REQUESTS, work.batch)):
            kept = self.caches[0][self.common.block_table[row].long()].transpose(0, 1).flatten(1, 2)[:, : work.context]
            keys, values = kept.float().transpose(1, 2).repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)
            rows = slice(row * work.query, (row + 1) * work.query)
            columns = torch.arange(work.context, device=DEVICE)
            mask = columns <= columns[work.context - work.query :, None]
            expected = torch.cat([
                functional.scaled_dot_product_attention(query[None], key[None], value[None], mask, scale=spec.scale)
                for query, key, value in zip(self.query[rows].float().transpose(0, 1), keys, values, strict=True)
            ])  # fmt: skip
            wrong += float((attended[rows].float().transpose(0, 1) - expected).square().sum())
            right += float(expected.square().sum())
        return (wrong / right) ** 0.5


def time_us(case: Case, backend: type[AttentionBackend], builder: Any) -> tuple[float, float, float]:
    """(microseconds per layer in a graph, of planning on the host, relative error)."""
    impl = backend.impl(case.spec)

    def run(cache: Tensor, plan: Any) -> Tensor:
        return impl.forward(case.query, None, None, cache, plan)

    started = time.perf_counter()
    plan = builder.build(case.common)
    error = case.error(run(case.caches[0], plan))
    torch.cuda.synchronize()
    started = time.perf_counter()
    plan = builder.build(case.common)
    planned = (time.perf_counter() - started) * 1e6
    run(case.caches[1], plan)
    return graph_us(lambda: [run(cache, plan) for cache in case.caches]) / len(case.caches), planned, error


def graph_us(call: Callable[[], object], replays: int = 9) -> float:
    """Microseconds of a call in a captured graph, the median. It runs once before, which compiles what it launches."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


class PlainBuilder(TritonBuilder):
    """Without the kernel of prompts that is for Hopper GPUs only."""

    def __init__(self, spec: AttentionLayerSpec, device: torch.device) -> None:
        super().__init__(spec, device, prompts=False)


class PlainBackend(TritonBackend):
    """As on other GPUs."""

    metadata_builder = PlainBuilder


def contenders() -> dict[str, tuple[type[AttentionBackend], bool]]:
    """Name -> (backend, whether with dependent launch)."""
    compute = torch.cuda.get_device_capability()
    found: dict[str, tuple[type[AttentionBackend], bool]] = {
        "TRITON_ATTN": (TritonBackend, False),
        "TRITON_ATTN, prompts in Triton": (PlainBackend, False),
        "TRITON_ATTN, dependent launch": (TritonBackend, True),
    }
    for provider in providers(compute):
        if BLOCK % provider.block_multiple == 0:
            found[f"FLASH_ATTN {provider.version} ({provider.name})"] = (_with_provider(provider, compute), False)
    if not FlashInferBackend.unsupported(AttentionLayerSpec(8, 8, 128, 1.0), "cuda", "bfloat16"):
        found["FLASHINFER"] = (FlashInferBackend, False)
    return found


def compare(spec: AttentionLayerSpec, works: list[Work]) -> list[dict[str, Any]]:
    """One row per workload and backend, printed as they come."""
    rows = []
    for work in works:
        case = Case(spec, work)
        for name, (backend, dependent) in contenders().items():
            launch.set_dependent(dependent)
            try:
                us, planned, error = time_us(case, backend, backend.metadata_builder(spec, DEVICE))
            except Exception as problem:
                print(f"{work!s:24} {name:40} failed: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                continue
            row = {"work": asdict(work), "backend": name, "us": us, "plan_us": planned, "error": error}
            rows.append(row | {"gb_s": case.cache_bytes / us / 1e3, "tflops": case.flops / us / 1e6})
            print(
                f"{work!s:24} {name:40} {us:9.1f} us {rows[-1]['gb_s']:6.0f} GB/s {rows[-1]['tflops']:6.0f} TFLOP/s"
                f"  plan {planned:5.0f} us  error {error:.1e}{'' if error < TOLERANCE else '  WRONG'}",
                flush=True,
            )
        launch.set_dependent(False)
        del case
        torch.cuda.empty_cache()
    return rows


def tune(spec: AttentionLayerSpec, roles: Sequence[str]) -> list[dict[str, Any]]:
    """Every candidate on every workload; the best three are printed, what is used, and what is best on the whole."""
    rows = []
    for role in roles:
        works = TUNED[role]
        slowdown: dict[Tiles, float] = {}
        for work in works:
            case, times = Case(spec, work), {}
            for tiles in CANDIDATES[role]:
                given: dict[str, Any] = {"prefill" if role == "prefill" else "decode": tiles}
                builder = TritonBuilder(spec, DEVICE, decode_tokens=work.query if role == "verify" else 1, **given)
                try:
                    us, _, error = time_us(case, TritonBackend, builder)
                except Exception as problem:
                    print(f"{tiles} failed: {type(problem).__name__}: {str(problem)[:120]}", flush=True)
                    continue
                if error < TOLERANCE:
                    times[tiles] = us
            best = sorted(times, key=lambda tiles: times[tiles])
            for tiles in best:
                slowdown[tiles] = slowdown.get(tiles, 0.0) + times[tiles] / times[best[0]] - 1
            group = spec.num_heads // spec.num_kv_heads
            used = tiles_for("prefill" if role == "prefill" else "decode", group, spec.head_size, work.query)
            for tiles in [*best[:3], *(tiles for tiles in best[3:] if _alike(tiles, used))]:
                print(f"{role:8} {work!s:24} {times[tiles]:8.1f} us {tiles}", flush=True)
            rows += [{"role": role, "work": asdict(work), "tiles": asdict(tiles), "us": times[tiles]} for tiles in best]
            del case
            torch.cuda.empty_cache()
        for tiles in sorted(slowdown, key=lambda tiles: slowdown[tiles])[:4]:
            print(f"{role:8} overall {slowdown[tiles] / len(works):6.1%} over the best: {tiles}", flush=True)
    return rows


def _alike(tiles: Tiles, used: Tiles) -> bool:
    return replace(tiles, min_share=used.min_share) == used


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("decode", "few", "prefill", "tune", "verify"))
    parser.add_argument("--heads", default="32,8,128", help="query heads, key heads, head size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heads, kv_heads, size = (int(part) for part in options.heads.split(","))
    spec = AttentionLayerSpec(heads, kv_heads, size, size**-0.5)
    results: dict[str, Any] = {}
    with torch.inference_mode():
        if options.only in (None, "decode"):
            results["decode"] = compare(spec, DECODE)
        if options.only == "few":
            results["few"] = compare(spec, FEW)
        if options.only in (None, "prefill"):
            results["prefill"] = compare(spec, PREFILL)
        if options.only == "tune":
            results["tune"] = tune(spec, list(TUNED))
        if options.only == "verify":
            results["verify"] = tune(spec, ["verify"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
