"""What `--deterministic` costs on a GPU, and that it holds: products, attention, and an engine of an 8B model.

    python benchmarks/gpu_deterministic.py [--only bits,attention,products,tiles,engine] [--shape qwen3-30b-a3b]

Needs a GPU of compute capability 9.0. `tiles` prints what one_sum_choices.py is made from.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
from torch import Tensor
from triton.testing import do_bench_cudagraph

from pagemill import LLM, SamplingParams
from pagemill.model.attention.backends.triton_attn import TritonBackend
from pagemill.model.attention.backends.triton_invariant import InvariantTritonBackend
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import CommonAttentionMetadata
from pagemill.model.kernels.kv_target import KVTarget
from pagemill.model.kernels.triton import device, invariant
from pagemill.model.kernels.triton.choices import Shape
from pagemill.model.kernels.triton.linear import linear as usual_linear
from pagemill.model.kernels.triton.one_sum import few_rows
from pagemill.model.kernels.triton.one_sum_choices import FewTiles, few_class, few_tiles

SHAPES: tuple[Shape, ...] = (
    (6144, 4096, False), (4096, 4096, False), (12288, 4096, True), (4096, 12288, False), (151936, 4096, False),
)  # fmt: skip
"""Of an 8B model's layer: qkv, o, gate and up, down; and its head."""
COPIES = 6
"""Of a weight, in turns, so that none is found in the L2 cache."""
ATTENTION = AttentionLayerSpec(32, 8, 128, 128**-0.5)
BACKENDS = (TritonBackend, InvariantTritonBackend)
CONFIGS = Path(__file__).parent / "configs"


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def weights_of(shape: Shape) -> list[Tensor]:
    outputs, size, gated = shape
    return [noise(outputs * (1 + gated), size) / 64 for _ in range(2 if outputs > 100_000 else COPIES)]


def gate_of(shape: Shape) -> str | None:
    return "silu" if shape[2] else None


def microseconds(run: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> float:
    """Of one call, in a graph of one with each of the inputs in turns."""
    return float(do_bench_cudagraph(lambda: [run(each) for each in inputs], rep=12)) * 1000 / len(inputs)


def usual(x: Tensor, gate: str | None, weight: Tensor) -> Tensor:
    return usual_linear(x, weight, None, gate)


def ours(x: Tensor, gate: str | None, weight: Tensor) -> Tensor:
    return invariant.linear(x, weight, None, gate)


def bits() -> None:
    """Whether a row has the same bits among any number of rows, and a token however its prompt is cut."""
    for shape in SHAPES[:4]:
        weight = weights_of(shape)[0]
        x = noise(2100, shape[1])
        first = ours(x, gate_of(shape), weight)
        counts = (1, 2, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 300, 512, 777, 1024)
        others = [rows for rows in counts if not torch.equal(ours(x[:rows], gate_of(shape), weight), first[:rows])]
        print(f"product {shape}: rows of other bits among {others or 'none'}", flush=True)
    past = 5000
    query, cache = noise(past, 32, 128), noise(320, 2, 16, 8, 128)
    whole = attend(InvariantTritonBackend, query, cache, 0, past)
    for begin, end in ((700, 1500), (3333, past), (4090, 4100), (4999, 5000)):
        same = torch.equal(attend(InvariantTritonBackend, query, cache, begin, end), whole[begin:end])
        print(f"attention, a part of a prompt [{begin}, {end}): {'same' if same else 'OTHER'}", flush=True)
    alone = torch.cat([attend(InvariantTritonBackend, query, cache, at, at + 1) for at in range(0, past, 7)])
    equal = (alone == whole[::7]).flatten(1).all(1)
    print(f"attention, decoded: {int(equal.sum())} of {len(equal)} tokens have the same bits", flush=True)


def attend(backend: Any, query: Tensor, cache: Tensor, begin: int, end: int) -> Tensor:
    """The tokens [begin, end) of one request, whose keys and values are in the cache."""
    common = common_of(1, end - begin, end, len(cache))
    plan = backend.metadata_builder(ATTENTION, torch.device("cuda")).build(common)
    found: Tensor = backend.impl(ATTENTION).forward(query[begin:end], None, None, cache, plan)
    return found


def attention() -> None:
    """Decoding and prompts, with 32 query and 8 key heads of 128."""
    cases = ((1, 1, 384), (1, 1, 4096), (1, 1, 32768), (16, 1, 640), (64, 1, 640), (256, 1, 640), (64, 1, 8192),
             (1, 2048, 2048), (1, 8192, 8192), (16, 512, 512))  # fmt: skip
    for count, new, past in cases:
        blocks = -(-past // 16)
        caches = [noise(count * blocks, 2, 16, 8, 128) for _ in range(2)]
        query = noise(count * new, 32, 128)
        found = []
        for backend in BACKENDS:
            impl = backend.impl(ATTENTION)
            plan = backend.metadata_builder(ATTENTION, torch.device("cuda")).build(
                common_of(count, new, past, count * blocks)
            )
            found.append(microseconds(partial(_attend_to, impl, query, plan), caches))
        print(f"{count} x {new} tokens, {past} keys: usual {found[0]:.1f}, invariant {found[1]:.1f}", flush=True)


def _attend_to(impl: Any, query: Tensor, plan: Any, cache: Tensor) -> Tensor:
    result: Tensor = impl.forward(query, None, None, cache, plan)
    return result


def common_of(count: int, new: int, past: int, blocks: int) -> CommonAttentionMetadata:
    """`count` requests of `new` tokens each, the last of `past`."""
    ints = partial(torch.tensor, dtype=torch.int32, device="cuda")
    return CommonAttentionMetadata(
        query_start=ints([index * new for index in range(count + 1)]), seq_lens=ints([past] * count),
        block_table=torch.arange(blocks, dtype=torch.int32, device="cuda").view(count, -1),
        slot_mapping=torch.zeros(count * new, dtype=torch.int64, device="cuda"), block_size=16,
        num_requests=count, num_tokens=count * new, max_query_len=new, min_query_len=new, max_seq_len=past,
    )  # fmt: skip


def products() -> None:
    """Linear layers as they run by default, and in one sum."""
    for shape in SHAPES:
        weights = weights_of(shape)
        for rows in (1, 8, 32, 64, 128, 256, 512, 1000, 8192):
            if shape[0] > 100_000 and rows > 256:
                continue
            x = noise(rows, shape[1])
            found = [microseconds(partial(each, x, gate_of(shape)), weights) for each in (usual, ours)]
            print(f"{shape} {rows} rows: usual {found[0]:.1f}, in one sum {found[1]:.1f}", flush=True)


def inputs() -> None:
    """Norms of heads and rotary embedding: bits, and times of the usual kernel and of this mode's."""
    qkv = noise(8192, 6144)
    norms = ((noise(128), 1e-6), (noise(128), 1e-6))
    angles = torch.randn(8192, 128, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    slots = torch.arange(8192, device="cuda")

    def run(rows: int, invariant_too: bool, cache: Tensor) -> Tensor:
        target = KVTarget(cache[:, 0], cache[:, 1], slots[:rows], invariant=invariant_too)
        query, _, _ = device.attention_inputs(qkv[:rows], 32, 128, (cos[:rows], sin[:rows]), norms, target)
        return query

    caches = [torch.zeros(512, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for invariant_too in (False, True):
        whole = run(8192, invariant_too, caches[0])
        others = 0
        for start in range(0, 8192, 64):
            part = KVTarget(caches[1][:, 0], caches[1][:, 1], slots[start : start + 64], invariant=invariant_too)
            query, _, _ = device.attention_inputs(
                qkv[start : start + 64], 32, 128, (cos[start : start + 64], sin[start : start + 64]), norms, part
            )
            others += int((query != whole[start : start + 64]).sum())
        keys = int((caches[0] != caches[1]).sum())
        taken = [microseconds(partial(run, rows, invariant_too), caches) for rows in (1, 256, 8192)]
        print(f"inputs, invariant {invariant_too}: {others} elements of queries and {keys} of keys have other bits in "
              f"steps of 64 tokens; 1, 256, 8192 tokens take {taken}", flush=True)  # fmt: skip


def layers() -> None:
    """A layer of an 8B model for few rows, in which kernels overlap as in an engine and find nothing in the L2 cache:
    with the usual products, with those of one_sum.py, and as this mode has them; without and with attention."""
    kinds = {shape: weights_of(shape) for shape in SHAPES[:4]}
    for rows in (1, 8):
        for name, product in (("usual", usual), ("one_sum.py", in_one_sum), ("as chosen", ours)):
            for backend in (None, *BACKENDS):
                taken = _layer(kinds, rows, product, backend)
                attended = "none" if backend is None else backend.name
                print(f"a layer, {rows} rows: products {name}, attention {attended}: {taken:.1f}", flush=True)


def in_one_sum(x: Tensor, gate: str | None, weight: Tensor) -> Tensor:
    shape = (len(weight) // (1 if gate is None else 2), weight.shape[1], gate is not None)
    return _few(x, few_tiles(len(x), shape), gate, weight)


def _layer(kinds: dict[Shape, list[Tensor]], rows: int, product: Any, backend: Any, past: int = 384) -> float:
    """Microseconds."""
    x, scale = noise(rows, 4096), noise(4096)
    norms = ((noise(128), 1e-6), (noise(128), 1e-6))
    angles = torch.randn(rows, 128, device="cuda")
    rope = angles.cos().bfloat16(), angles.sin().bfloat16()
    common = common_of(rows, 1, past, rows * past // 16)
    caches = [noise(rows * past // 16, 2, 16, 8, 128) for _ in range(COPIES)]
    plan = None if backend is None else backend.metadata_builder(ATTENTION, torch.device("cuda")).build(common)

    def attended(qkv: Tensor, cache: Tensor) -> Tensor:
        if backend is None:
            return qkv[:, :4096].contiguous()
        target = KVTarget(cache[:, 0], cache[:, 1], common.slot_mapping, invariant=True)
        query, _, _ = device.attention_inputs(qkv, 32, 128, rope, norms, target)
        result: Tensor = backend.impl(ATTENTION).forward(query, None, None, cache, plan)
        return result.view(rows, 4096)

    def all_layers() -> None:
        hidden, residual = x, x.clone()
        for copy, cache in enumerate(caches):
            for shape, weights in kinds.items():
                if shape in (SHAPES[0], SHAPES[2]):
                    hidden = device.rms_norm(hidden, scale, 1e-6, residual)
                hidden = product(hidden, gate_of(shape), weights[copy])
                if shape == SHAPES[0]:
                    hidden = attended(hidden, cache)

    return float(do_bench_cudagraph(all_layers, rep=20)) * 1000 / COPIES


CANDIDATES = {
    16: ((16, 128, 1, 8), (16, 128, 2, 8), (32, 128, 2, 8), (64, 128, 4, 9), (64, 128, 4, 5), (64, 256, 4, 5)),
    128: ((64, 128, 4, 4), (64, 64, 4, 8), (64, 64, 4, 6), (64, 64, 4, 4), (128, 64, 8, 6), (128, 64, 4, 6)),
}


def tiles() -> None:
    """Tiles of few rows."""
    for shape in SHAPES[:4]:
        weights = weights_of(shape)
        for rows, candidates in CANDIDATES.items():
            x = noise(1 if rows == 16 else rows, shape[1])
            found = []
            for each in candidates:
                chosen = FewTiles(*each)
                try:
                    found.append((microseconds(partial(_few, x, chosen, gate_of(shape)), weights), each))
                except triton.runtime.errors.OutOfResources:
                    continue
            best = ", ".join(f"{taken:.1f} {each}" for taken, each in sorted(found)[:4])
            print(f"{shape} up to {few_class(rows)} rows: {best}", flush=True)


def _few(x: Tensor, chosen: FewTiles, gate: str | None, weight: Tensor) -> Tensor:
    return few_rows(x, weight, chosen, None, gate, x.dtype)


def engine(shape: str) -> None:
    """A model of random weights: one request alone, and many, without and with the mode, in processes of their own."""
    for deterministic in (False, True):
        done = subprocess.run([sys.executable, __file__, "--shape", shape, "--engine", json.dumps(deterministic)],
                              text=True, capture_output=True, check=False)  # fmt: skip
        print("".join(line + "\n" for line in done.stdout.splitlines() if line.startswith("engine")), end="")
        if done.returncode:
            print(done.stderr[-3000:])
        sys.stdout.flush()


def run_engine(shape: str, deterministic: bool) -> None:
    """The figures of one engine."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 150_000, (256, 512), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, detokenize=False)
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 4096}
    with LLM(str(CONFIGS / shape), device="cuda", max_num_seqs=256, deterministic=deterministic, **settings) as llm:
        works = {"1 x 128 + 256": [prompts[0][:128]], "16 x 512 + 256": prompts[:16], "256 x 512 + 256": prompts}
        for name, work in works.items():
            taken = []
            for _ in range(3):
                llm.reset_prefix_cache()
                begin = time.perf_counter()
                outputs = llm.generate(work, params, use_tqdm=False)
                taken.append(time.perf_counter() - begin)
            tokens = 256 * len(work)
            print(f"engine, deterministic {deterministic}, {name}: {tokens / min(taken):.0f} tokens/s, "
                  f"{min(taken) / 256 * 1e3:.3f} ms a step")  # fmt: skip
        scored = msgspec.structs.replace(params, logprobs=2, max_tokens=64)
        together = [_bits(output) for output in llm.generate(prompts, scored, use_tqdm=False)]
        llm.reset_prefix_cache()
        alone = [_bits(llm.generate([prompts[index]], scored, use_tqdm=False)[0]) for index in range(0, 256, 16)]
        same = sum(one == together[16 * index] for index, one in enumerate(alone))
        tokens = sum(one[0] == together[16 * index][0] for index, one in enumerate(alone))
        print(f"engine, deterministic {deterministic}: of {len(alone)} requests, alone and among 256, {same} have the "
              f"same tokens and log-probabilities, {tokens} the same tokens; {len(outputs)} ran")  # fmt: skip


def _bits(output: Any) -> tuple[list[int], list[list[tuple[int, float]]]]:
    first = output.outputs[0]
    return list(first.token_ids), [[(token, one.logprob) for token, one in each.items()] for each in first.logprobs]


PARTS = {
    "bits": bits,
    "attention": attention,
    "products": products,
    "tiles": tiles,
    "layers": layers,
    "inputs": inputs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bits,attention,products,engine")
    parser.add_argument("--shape", default="qwen3-8b", help="of `engine`: a folder of benchmarks/configs")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.engine:
        run_engine(asked.shape, json.loads(asked.engine))
        return
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    for name in asked.only.split(","):
        try:
            if name == "engine":
                engine(asked.shape)
            else:
                PARTS[name]()
        except Exception:  # the other parts have answers of their own
            traceback.print_exc()


if __name__ == "__main__":
    main()
