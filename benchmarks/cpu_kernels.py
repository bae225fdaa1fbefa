"""Time of the native CPU kernels at the sizes of SmolLM2-135M, beside the torch reference. Prints microseconds.

python benchmarks/cpu_kernels.py
"""

import time
from collections.abc import Callable

import torch

from pagemill.model.attention.backends.cpu import CpuBackend
from pagemill.model.attention.backends.torch_cpu import TorchCpuBackend
from pagemill.model.attention.interface import AttentionLayerSpec, CommonAttentionMetadata
from pagemill.model.kernels import native, reference
from pagemill.platforms.cpu import CpuPlatform

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16


def microseconds(work: Callable[[], object]) -> float:
    """Median of 15 runs after 3."""
    times = []
    for _ in range(18):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times[3:])[7] * 1e6


def attention(num_requests: int, query_len: int, seq_len: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """One layer's attention, native and reference."""
    blocks_each = -(-seq_len // BLOCK)
    num_blocks = 1 + num_requests * blocks_each
    order = (torch.randperm(num_blocks - 1) + 1).to(torch.int32).view(num_requests, blocks_each)
    cache = torch.randn(2, num_blocks, KV_HEADS, BLOCK, DIM).bfloat16()
    num_tokens = num_requests * query_len
    query, key, value = (torch.randn(num_tokens, heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    positions = torch.arange(seq_len - query_len, seq_len).repeat(num_requests)
    rows = torch.arange(num_requests).repeat_interleave(query_len)
    common = CommonAttentionMetadata(
        query_start=torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32),
        seq_lens=torch.full((num_requests,), seq_len, dtype=torch.int32),
        block_table=order,
        slot_mapping=order[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_query_len=query_len,
        max_seq_len=seq_len,
        block_size=BLOCK,
    )
    spec = AttentionLayerSpec(HEADS, KV_HEADS, DIM, DIM**-0.5)
    works = []
    for backend in (CpuBackend, TorchCpuBackend):
        metadata = backend.metadata_builder(spec, torch.device("cpu")).build(common)
        impl = backend.impl(spec)
        works.append(lambda impl=impl, metadata=metadata: impl.forward(query, key, value, cache, metadata))
    return works[0], works[1]


def main() -> None:
    platform = CpuPlatform()
    platform.set_threads(platform.facts().num_cores)
    print(f"{'work':38}{'native':>10}{'torch':>10}")
    for num_requests, query_len, seq_len in ((1, 1, 256), (1, 1, 2048), (64, 1, 256), (1, 512, 512), (64, 32, 128)):
        ours, theirs = attention(num_requests, query_len, seq_len)
        name = f"attention, {num_requests} x {query_len} on {seq_len}"
        print(f"{name:38}{microseconds(ours):>10.0f}{microseconds(theirs):>10.0f}")
    for num_tokens in (1, 64, 512):
        x, weight = torch.randn(num_tokens, 576).bfloat16(), torch.ones(576).bfloat16()
        residual, wide = torch.randn_like(x), torch.randn(num_tokens, 3072).bfloat16()
        heads, table = torch.randn(num_tokens, 12, DIM).bfloat16(), torch.randn(num_tokens, DIM).bfloat16()
        for name, call in {
            "add and rms_norm": lambda k, x=x, w=weight, r=residual: k.rms_norm(x, w, 1e-5, r),
            "rotate": lambda k, h=heads, t=table: k.rotate_(h, t, t),
            "silu_mul": lambda k, w=wide: k.gated(w, False),
        }.items():
            ours, theirs = (microseconds(lambda k=k, call=call: call(k)) for k in (native, reference))
            print(f"{name + f', {num_tokens} tokens':38}{ours:>10.1f}{theirs:>10.1f}")


if __name__ == "__main__":
    main()
