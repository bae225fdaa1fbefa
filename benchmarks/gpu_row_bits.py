"""Which kernels give a row the same bits whatever is computed beside it: what batch invariance can be built from.

    python benchmarks/gpu_row_bits.py

Prints one line per question, with the share of rows that are bitwise equal to those of the first variant, and the time
of the candidates for a mode in which all of them are. Needs a GPU of compute capability 9.0.
"""

import traceback
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.testing import do_bench_cudagraph
from triton.tools.tensor_descriptor import TensorDescriptor

from pagemill.model.attention.backends.triton_attn import TritonBuilder, TritonImpl
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import CommonAttentionMetadata
from pagemill.model.kernels.triton import choices, device
from pagemill.model.kernels.triton.attention_tiles import Tiles
from pagemill.model.kernels.triton.choices import SkinnyChoice
from pagemill.model.kernels.triton.gemv import gemv
from pagemill.model.kernels.triton.skinny import skinny

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
"""Outputs and inputs of an 8B model's layer: qkv, o, gate and up, down."""
COPIES = 6
"""Of a weight, in turns, so that none is found in the L2 cache."""


@triton.jit
def _product(  # noqa: PLR0913
    out, x_map, weight_map, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """Program (tile): [M, K] times [N, K] -> [M, N] float32 or rounded, one sum over K in ascending order."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    first = tile // (GROUP * num_n) * GROUP
    height = tl.minimum(num_m - first, GROUP)
    m = first + tile % (GROUP * num_n) % height
    n = tile % (GROUP * num_n) // height
    if SWAPPED:  # noqa: SIM108
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        rows = x_map.load([m * BLOCK_M, k])
        weight = weight_map.load([n * BLOCK_N, k])
        if SWAPPED:  # noqa: SIM108
            sums = tl.dot(weight, rows.T, sums)
        else:
            sums = tl.dot(rows, weight.T, sums)
    if SWAPPED:
        sums = sums.T
    tokens, outputs = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (tokens < M)[:, None] & (outputs < N)[None, :]
    tl.store(out + tokens[:, None].to(tl.int64) * N + outputs[None, :], sums.to(out.dtype.element_ty), mask)


def product(x: Tensor, weight: Tensor, tiles: tuple[int, int, int, int, int], swapped: bool = False,
            dtype: torch.dtype = torch.float32) -> Tensor:  # fmt: skip
    """x [M, K] times weight [N, K]; tiles: M, N, K, warps, stages."""
    (rows, size), outputs = x.shape, len(weight)
    m, n, k, warps, stages = tiles
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    _product[triton.cdiv(rows, m) * triton.cdiv(outputs, n),](
        out, TensorDescriptor(x, [rows, size], [size, 1], [m, k]),
        TensorDescriptor(weight, [outputs, size], [size, 1], [n, k]), rows, outputs, size,
        BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP=8, SWAPPED=swapped, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def say(what: str, first: Tensor, other: Tensor) -> None:
    """Share of the rows that are bitwise equal."""
    equal = (first == other).flatten(1).all(1).float().mean().item()
    print(f"{what:70s} {equal:7.3f} of {len(other)} rows", flush=True)


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def products() -> None:
    """Products: instructions, tiles, operands exchanged, cuBLAS."""
    x, weight = noise(4096, 4096), noise(4096, 4096) / 64
    first = product(x, weight, (128, 128, 64, 8, 3))
    for name, tiles, swapped in (
        ("wgmma 128x256x64", (128, 256, 64, 8, 3), False),
        ("wgmma 64x128x128", (64, 128, 128, 4, 3), False),
        ("mma.sync 16x128x64, 4 warps", (16, 128, 64, 4, 3), False),
        ("mma.sync 32x64x128, 2 warps", (32, 64, 128, 2, 3), False),
        ("wgmma, weight times rows 64x16x128", (16, 64, 128, 4, 3), True),
        ("wgmma, weight times rows 64x64x128", (64, 64, 128, 4, 3), True),
    ):
        say(f"product: {name} = wgmma 128x128x64", first, product(x, weight, tiles, swapped))
    for rows in (1, 3, 16, 64, 256, 1024, 4096):
        found = torch.mm(x[:rows], weight.t(), out_dtype=torch.float32)
        say(f"product: cuBLAS of {rows} rows = wgmma 128x128x64", first[:rows], found)


def few_rows() -> None:
    """skinny.py with one split: rows together, kinds of tiles, who sums."""
    x, weight = noise(64, 4096), noise(4096, 4096) / 64
    for split in (1, 2, 4):
        first = skinny(x, weight, SkinnyChoice(128, 4, 5, split))
        for rows in (1, 3, 16, 17, 32, 64):
            for early in (False, True) if rows <= 16 else (False,):
                found = skinny(x[:rows], weight, SkinnyChoice(128, 4, 4, split, early=early))
                say(f"skinny: {rows} rows, split {split}, early {early} = 64 rows", first[:rows], found)
    say("gemv = skinny split 1", skinny(x, weight, SkinnyChoice(128, 4, 5))[:1],
        gemv(x[:1], weight, choices.gemv_choice((4096, 4096, False), x.dtype)))  # fmt: skip


def small_kernels() -> None:
    """Norms, logits to tokens and logprobs."""
    for size in (128, 1024, 2560, 4096):
        x, scale = noise(256, size), noise(size)
        first = device.rms_norm(x, scale, 1e-6)
        for rows in (1, 3, 64):
            say(f"rms_norm of {size}: {rows} rows = 256", first[:rows], device.rms_norm(x[:rows], scale, 1e-6))
    heads = noise(256, 48, 128)
    say("rms_norm of heads: 1 row = 256", device.rms_norm(heads, noise(128) * 0 + 1, 1e-6)[:1],
        device.rms_norm(heads[:1], noise(128) * 0 + 1, 1e-6))  # fmt: skip
    logits = noise(256, 151936, dtype=torch.float32) * 3
    kept = torch.log_softmax(logits, -1)
    mass = torch.logsumexp(logits, -1, keepdim=True)
    for rows in (1, 3, 64):
        say(f"torch.log_softmax: {rows} rows = 256", kept[:rows], torch.log_softmax(logits[:rows], -1))
        say(f"torch.logsumexp: {rows} rows = 256", mass[:rows], torch.logsumexp(logits[:rows], -1, keepdim=True))


def attend(query: Tensor, cache: Tensor, lengths: tuple[int, int], decode: Tiles, prefill: Tiles) -> Tensor:
    """The tokens [computed, past) of one request, whose keys and values are in the cache."""
    computed, past = lengths
    spec = AttentionLayerSpec(32, 8, 128, 128**-0.5)
    new = past - computed
    table = torch.arange(len(cache), dtype=torch.int32, device="cuda").unsqueeze(0)
    common = CommonAttentionMetadata(
        query_start=torch.tensor([0, new], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([past], dtype=torch.int32, device="cuda"),
        block_table=table, slot_mapping=torch.arange(computed, past, device="cuda"), block_size=16,
        num_requests=1, num_tokens=new, max_query_len=new, min_query_len=new, max_seq_len=past,
    )  # fmt: skip
    plan = TritonBuilder(spec, torch.device("cuda"), decode, prefill).build(common)
    return TritonImpl(spec).forward(query[computed:past], None, None, cache, plan)


def attention() -> None:
    """A token in a prompt, in a chunk, and decoded, with keys in turns of equal length and no split."""
    past = 1500
    query, cache = noise(past, 32, 128), noise(128, 2, 16, 8, 128)
    decode = Tiles(16, 64, 2, 3, 4, 1 << 20)
    prefill = Tiles(128, 64, 8, 5)
    whole = attend(query, cache, (0, past), decode, prefill)
    for at in (700, 1024, 1337):
        say(f"attention: chunk from {at} = whole", whole[at:], attend(query, cache, (at, past), decode, prefill))
    few = Tiles(64, 64, 4, 3)
    say("attention: tiles of 64 rows = 128 rows", whole, attend(query, cache, (0, past), decode, few))
    small = Tiles(16, 64, 1, 3)
    say("attention: tiles of 16 rows, 1 warp = 128 rows", whole, attend(query, cache, (0, past), decode, small))
    for warps in (1, 2, 4):
        tiles = Tiles(16, 64, warps, 3, 4, 1 << 20)
        alone = torch.cat([attend(query, cache, (at, at + 1), tiles, prefill) for at in range(1200, 1300)])
        say(f"attention: decoded, {warps} warps = whole", whole[1200:1300], alone)


def timings() -> None:
    """One row by gemv and by skinny, and many rows by cuBLAS and by the plainest kernel of ours."""
    for outputs, size in SHAPES:
        weights = [noise(outputs, size) for _ in range(COPIES)]
        print(f"{outputs}x{size}: {_one_row(weights)}", flush=True)
        for rows in (128, 256, 8192):
            print(f"{outputs}x{size}: {rows} rows {_many_rows(noise(rows, size), weights)}", flush=True)


def _one_row(weights: list[Tensor]) -> str:
    outputs, size = weights[0].shape
    x = noise(1, size)
    tiles = choices.gemv_choice((outputs, size, False), x.dtype)
    line = f"1 row gemv {_microseconds(partial(gemv, x, choice=tiles), weights):.1f} us"
    for split in (1, 2, 3, 4, 6, 8):
        if size // split < 1024 or outputs // 64 * split > 400:
            continue
        for stages in (5, 8) if split < 3 else (4, 5):
            few = SkinnyChoice(128, 4, stages, split, early=stages == 4)
            taken = _microseconds(partial(skinny, x, choice=few), weights)
            line += f", skinny split {split} stages {stages} {taken:.1f}"
    return line


def _many_rows(x: Tensor, weights: list[Tensor]) -> str:
    line = f"cuBLAS {_microseconds(partial(functional.linear, x), weights):.1f} us"
    for tiles in ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 64, 128, 4, 4)):
        taken = _microseconds(partial(product, x, tiles=tiles, dtype=x.dtype), weights)
        line += f", {'x'.join(map(str, tiles))} {taken:.1f}"
    return line


def _microseconds(multiply: Callable[..., Tensor], weights: list[Tensor]) -> float:
    """Of one product, in a graph of one with each of the weights in turns."""
    return float(do_bench_cudagraph(lambda: [multiply(weight=weight) for weight in weights], rep=12)) * 1000 / COPIES


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    for part in (products, few_rows, small_kernels, attention, timings):
        try:
            part()
        except Exception:  # the other questions have answers of their own
            traceback.print_exc()


if __name__ == "__main__":
    main()
