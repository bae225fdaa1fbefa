"""Time of the native CPU kernels, beside plain torch: `python benchmarks/cpu_kernels.py --filter decode --threads 1`.

Linear layers: every weight format, one row to many. Attention: GB/s of keys and values read (decode), GFLOP/s of the
two products, causal half only (prefill). Rows but those of linear layers are the median of several runs over different
caches, so that keys and values come from memory, not from the cache of the CPU, as they do between the layers of a
model.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.backends.cpu import CpuBackend
from pagemill.model.attention.backends.torch_cpu import TorchCpuBackend
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import AttentionBackend, CommonAttentionMetadata
from pagemill.model.kernels import native, reference
from pagemill.model.kernels.linear import PackedLinear, linear, pack_bf16
from pagemill.model.kernels.linear_int import PANEL_FORMATS, pack_blocks

SECONDS_PER_ROW = 0.25
BLOCK_SIZE = 16
CACHES_BYTES = 256 << 20
WEIGHTS_BYTES = 96 << 20
MAX_PRODUCTS = 4 << 30
DTYPE = torch.bfloat16


def median_seconds(run: Callable[[int], object]) -> float:
    """run(i) is called for i = 0, 1, ... until the time is up."""
    return statistics.median(timed(run))


def timed(run: Callable[[int], object]) -> list[float]:
    """Seconds of each run."""
    run(0)
    times: list[float] = []
    while sum(times) < SECONDS_PER_ROW or len(times) < 3:
        start = time.perf_counter()
        run(len(times))
        times.append(time.perf_counter() - start)
    return times


def attention_row(
    backend: type[AttentionBackend],
    heads: tuple[int, int, int],
    batch: tuple[int, int, int],
    kv_dtype: str = "bfloat16",
) -> tuple[float, int, int]:
    """(seconds, bytes of keys and values, floating-point operations); batch: requests, query and sequence length."""
    num_requests, query_len, length = batch
    num_heads, num_kv_heads, head_size = heads
    spec = AttentionLayerSpec(num_heads, num_kv_heads, head_size, head_size**-0.5)
    blocks = -(-length // BLOCK_SIZE)
    num_blocks = num_requests * blocks + 1
    table = (torch.randperm(num_blocks - 1) + 1).int().view(num_requests, blocks)
    positions = torch.arange(length - query_len, length).repeat(num_requests, 1)
    slots = table.gather(1, positions // BLOCK_SIZE).long() * BLOCK_SIZE + positions % BLOCK_SIZE
    num_tokens = num_requests * query_len
    common = CommonAttentionMetadata(
        torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32),
        torch.full((num_requests,), length, dtype=torch.int32), table, slots.flatten(), num_requests, num_tokens,
        query_len, length, BLOCK_SIZE,
    )  # fmt: skip
    cache_spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads, head_size, kv_dtype)
    shape = backend.cache_shape(num_blocks, cache_spec)
    size = num_blocks * cache_spec.page_bytes()
    first = random_cache(shape, kv_dtype)
    caches = [first, *(first.clone() for _ in range(CACHES_BYTES // size - 1))]
    qkv = torch.randn((num_tokens, num_heads + 2 * num_kv_heads, head_size), dtype=DTYPE)
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    metadata = backend.metadata_builder(spec, torch.device("cpu")).build(common)
    impl = backend.impl(spec)
    seconds = median_seconds(lambda i: impl.forward(query, key, value, caches[i % len(caches)], metadata))
    pairs = num_requests * (query_len * (length - query_len) + query_len * (query_len + 1) // 2)
    kv_bytes = num_requests * length * cache_spec.page_bytes() // BLOCK_SIZE
    return seconds, kv_bytes, 4 * pairs * num_heads * head_size


def random_cache(shape: tuple[int, ...], kv_dtype: str) -> torch.Tensor:
    """Integers are such that scales among them are small."""
    if kv_dtype == "int8":
        return torch.randint(0x38, 0x3F, shape, dtype=torch.int8)
    return torch.randn(shape, dtype=DTYPE)


def attention_rows(arguments: argparse.Namespace) -> None:
    shapes = {"9/3 x 64": (9, 3, 64), "32/8 x 128": (32, 8, 128)}
    batches = {
        "decode 1 x 256": (1, 1, 256), "decode 1 x 2048": (1, 1, 2048), "decode 64 x 256": (64, 1, 256),
        "decode 64 x 2048": (64, 1, 2048), "prefill 512": (1, 512, 512), "prefill 64 x 128": (64, 128, 128),
        "chunk 256 after 1792": (1, 256, 2048),
    }  # fmt: skip
    for heads_name, heads in shapes.items():
        for (name, batch), kv_dtype in itertools.product(batches.items(), ("bfloat16", "int8")):
            title = f"attention {heads_name:10} {name}" + (", KV int8" if kv_dtype == "int8" else "")
            if arguments.filter not in title:
                continue
            seconds, kv_bytes, flops = attention_row(CpuBackend, heads, batch, kv_dtype)
            plain = attention_row(TorchCpuBackend, heads, batch, kv_dtype)[0] if arguments.torch else 0.0
            gflops, gbytes = flops / seconds / 1e9, kv_bytes / seconds / 1e9
            rate = f"{gflops:7.1f} GFLOP/s" if batch[1] > 1 else f"{gbytes:7.1f} GB/s   "
            show(title, seconds, plain, rate)


def packed_weight(name: str, outputs: int, inputs: int) -> PackedLinear:
    """A weight of any numbers: bf16, or blocks of a type; of one that ends in _WIDE, inputs have 16 bits."""
    if name == "bf16":
        return pack_bf16(torch.randn(outputs, inputs, dtype=DTYPE))
    kind = PANEL_FORMATS[name]
    blocks = torch.randint(0, 100, (outputs, inputs // 32 * kind.block_bytes), dtype=torch.uint8)
    return pack_blocks(kind, blocks)


def linear_rows(arguments: argparse.Namespace) -> None:
    """The shortest of many runs, by turns over weights that together do not fit the CPU's cache: rates that a busy
    machine changes least. GB/s of weights read for one row, GOP/s for many."""
    for outputs, inputs in ((960, 576), (3072, 576), (576, 1536), (49152, 576), (8192, 2048)):
        for name in ("bf16", *PANEL_FORMATS):
            titles = {rows: f"linear {name:9} {outputs} x {inputs}, {rows} rows" for rows in (1, 8, 64, 512)}
            if not any(arguments.filter in title for title in titles.values()):
                continue
            first = packed_weight(name, outputs, inputs)
            num_bytes = first.tensors[0].nbytes
            weights = [
                first,
                *(packed_weight(name, outputs, inputs) for _ in range(min(63, WEIGHTS_BYTES // num_bytes))),
            ]
            for rows, title in titles.items():
                x = torch.randn(rows, inputs, dtype=DTYPE)
                if arguments.filter not in title or rows * outputs * inputs > MAX_PRODUCTS:
                    continue
                seconds = min(timed(lambda _, x=x, w=weights: [linear(x, one) for one in w])) / len(weights)
                gops = f"{2 * rows * outputs * inputs / seconds / 1e9:7.1f} GOP/s  "
                show(title, seconds, 0.0, f"{num_bytes / seconds / 1e9:7.1f} GB/s   " if rows == 1 else gops)


def row_kernel_rows(arguments: argparse.Namespace) -> None:
    for tokens in (1, 64):
        for size, inner in ((576, 1536), (4096, 12288)):
            x, weight = torch.randn(tokens, size, dtype=DTYPE), torch.randn(size, dtype=DTYPE)
            gate_up, residual = torch.randn(tokens, 2 * inner, dtype=DTYPE), torch.randn(tokens, size, dtype=DTYPE)
            qk, table = torch.randn(tokens, size // 64, 64, dtype=DTYPE), torch.randn(tokens, 64, dtype=DTYPE)
            logits = torch.randn(tokens, 49152, dtype=DTYPE)
            cases: dict[str, tuple[Callable[..., object], int]] = {
                f"rms_norm {tokens} x {size}": (lambda m, a=(x, weight): m.rms_norm(*a, 1e-5), 4 * x.numel()),
                f"add + rms_norm {tokens} x {size}": (
                    lambda m, a=(x, weight), r=residual: m.rms_norm(*a, 1e-5, r), 8 * x.numel(),
                ),
                f"silu_mul {tokens} x {inner}": (lambda m, a=gate_up: m.gated(a, False), 3 * gate_up.numel()),
                f"gelu_tanh_mul {tokens} x {inner}": (lambda m, a=gate_up: m.gated(a, True), 3 * gate_up.numel()),
                f"rotate {tokens} x {size // 64} x 64": (lambda m, a=qk, t=table: m.rotate_(a, t, t), 4 * qk.numel()),
                f"argmax {tokens} x 49152": (lambda m, a=logits: m.argmax(a), 2 * logits.numel()),
            }  # fmt: skip
            for name, (run, num_bytes) in cases.items():
                if arguments.filter not in name:
                    continue
                seconds = median_seconds(lambda _, run=run: run(native))
                plain = median_seconds(lambda _, run=run: run(reference)) if arguments.torch else 0.0
                show(name, seconds, plain, f"{num_bytes / seconds / 1e9:7.1f} GB/s   ")


def show(name: str, seconds: float, plain: float, rate: str) -> None:
    beside = f"   torch {plain * 1e6:10.1f} us  x{plain / seconds:.1f}" if plain else ""
    print(f"{name:42} {seconds * 1e6:10.1f} us {rate}{beside}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--filter", default="", help="only rows whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--torch", action="store_true", help="time plain torch too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{native.loaded_library().isa().decode()}, {arguments.threads} threads, {DTYPE}")
    linear_rows(arguments)
    attention_rows(arguments)
    row_kernel_rows(arguments)


if __name__ == "__main__":
    main()
