"""Products in which a row has the same bits whatever is computed beside it: every output is one sum over the inputs, in
ascending order, in float32.

With that order fixed, the rest is free: tiles, warps, the instruction (mma.sync or wgmma), rows times weight or weight
times rows, all give the same bits (benchmarks/gpu_row_bits.py). So a few rows are multiplied as in skinny.py, the
weight by the rows, tiles fetched by the copy engine, and many as usual, by programs that stay for several tiles.

Knows no layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gated import activate
from pagemill.model.kernels.triton.one_sum_choices import FewTiles, ManyTiles, few_class


@triton.jit
def _end(out, sums, up_sums, bias, tokens, outputs, M, N, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
         GELU: tl.constexpr):  # fmt: skip
    """Bias, and the gate with the roundings of gated.py, which gates what has many rows."""
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_BIAS:
        sums += tl.load(bias + outputs, outputs < N, 0.0).to(tl.float32)[None, :]
        if GATED:
            up_sums += tl.load(bias + N + outputs, outputs < N, 0.0).to(tl.float32)[None, :]
    if GATED:
        activated = activate(sums.to(dtype).to(tl.float32), GELU).to(dtype).to(tl.float32)
        sums = activated * up_sums.to(dtype).to(tl.float32)
    mask = (tokens < M)[:, None] & (outputs < N)[None, :]
    tl.store(out + tokens[:, None].to(tl.int64) * N + outputs[None, :], sums.to(dtype), mask)


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@triton.jit(do_not_specialize=["M"])
def _few(
    out, rows_map, weight_map, bias, M, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs): all M rows, at most BLOCK_M."""
    first = tl.program_id(0) * BLOCK_N
    tokens, outputs = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_sums = sums
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        # Loads without an operation between them share a barrier.
        rows = rows_map.load([0, start])
        tile = weight_map.load([first, start])
        sums = tl.dot(tile, rows.T, sums)
        if GATED:
            tile = weight_map.load([N + first, start])
            up_sums = tl.dot(tile, rows.T, up_sums)
    _end(out, sums.T, up_sums.T, bias, tokens, outputs, M, N, HAS_BIAS, GATED, GELU)


@triton.jit(do_not_specialize=["M"])
def _many(
    out, rows_map, weight_map, bias, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: every so many-th tile. GROUP tiles of rows take turns with one block of the weight."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * num_n) * GROUP
        height = tl.minimum(num_m - first, GROUP)
        m = (first + tile % (GROUP * num_n) % height) * BLOCK_M
        n = tile % (GROUP * num_n) // height * BLOCK_N
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            rows = rows_map.load([m, start])
            weight = weight_map.load([n, start])
            sums = tl.dot(rows, weight.T, sums)
        tokens, outputs = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        _end(out, sums, sums, bias, tokens, outputs, M, N, HAS_BIAS, False, False)


def few_rows(
    x: Tensor, weight: Tensor, tiles: FewTiles, bias: Tensor | None, gate: str | None, out_dtype: torch.dtype
) -> Tensor:
    """[M, K] times [N, K] -> [M, N], with a gate [M, N / 2]; M up to MOST_FEW; rows of x and weight
    begin at multiples of 16 bytes."""
    (num_rows, size), stacked = x.shape, len(weight)
    num_outputs = stacked // (1 if gate is None else 2)
    out = torch.empty(num_rows, num_outputs, dtype=out_dtype, device=x.device)
    block_m = few_class(num_rows)
    launch.on(_few, (triton.cdiv(num_outputs, tiles.outputs),))(
        out, TensorDescriptor(x, [num_rows, size], [x.stride(0), 1], [block_m, tiles.inputs]),
        TensorDescriptor(weight, [stacked, size], [size, 1], [tiles.outputs, tiles.inputs]),
        out if bias is None else bias, num_rows, num_outputs,
        K=size, BLOCK_M=block_m, BLOCK_N=tiles.outputs, BLOCK_K=tiles.inputs, STAGES=tiles.stages,
        HAS_BIAS=bias is not None, GATED=gate is not None, GELU=gate == "gelu_tanh", PDL=launch.dependent(),
        **launch.options(tiles.warps),
    )  # fmt: skip
    return out


def many_rows(
    x: Tensor, weight: Tensor, tiles: ManyTiles, bias: Tensor | None, out: Tensor, num_processors: int
) -> Tensor:
    """[M, K] times [N, K] -> `out` [M, N], contiguous; rows of x and weight begin at multiples of 16
    bytes."""
    (num_rows, size), num_outputs = x.shape, len(weight)
    num_tiles = triton.cdiv(num_rows, tiles.rows) * triton.cdiv(num_outputs, tiles.outputs)
    launch.on(_many, (min(num_tiles, num_processors),))(
        out, TensorDescriptor(x, [num_rows, size], [x.stride(0), 1], [tiles.rows, tiles.inputs]),
        TensorDescriptor(weight, [num_outputs, size], [size, 1], [tiles.outputs, tiles.inputs]),
        out if bias is None else bias, num_rows, num_outputs, size,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.outputs, BLOCK_K=tiles.inputs, GROUP=8, STAGES=tiles.stages,
        HAS_BIAS=bias is not None, PDL=launch.dependent(), **launch.options(tiles.warps),
    )  # fmt: skip
    return out
