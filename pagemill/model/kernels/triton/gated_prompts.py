"""The product of a gated layer for many rows, on Hopper GPUs: the gate is applied to sums in registers, so that they
are never written and read. Written in Gluon, as prompt_attention.py: programs that stay, one warp that fetches tiles
with the copy engine (TMA), and two warpgroups of 64 rows each, which multiply by wgmma.

Knows no layer.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagemill.model.kernels.gpu_facts import is_hopper, num_processors
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gluon_launch import let_next_start, wait_for_inputs

ROWS = 128
OUTPUTS = 128
"""Of a tile: rows, and outputs of each half of the weight."""
INPUTS = 64
"""Of a turn."""
STAGES = 4
GROUP = 16
"""Blocks of rows that take turns with one block of the weight."""
_FEWEST = 512
"""Rows: of fewer, cuBLAS has better tiles."""
_USE = 0.9
"""Least share of the last turn's multiprocessors, and of the last block's rows, that has something to do."""


@gluon.jit
def _place(tile, num_m, num_n, GROUP: gl.constexpr):
    """First row and first output of a tile."""
    first = tile // (GROUP * num_n) * GROUP
    height = gl.minimum(num_m - first, GROUP)
    inside = tile % (GROUP * num_n)
    return (first + inside % height) * 128, inside // height * 128


@gluon.jit
def _fetch(
    rows_map, weight_map, rows, weights, full, empty, num_m, num_n, N, K,
    STAGES: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp: rows and both halves of the weight for every turn of every tile of this program."""
    wait_for_inputs(PDL)
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _place(tile, num_m, num_n, GROUP)
        for start in range(0, K, 64):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 3 * 128 * 64 * 2)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    rows_map, [m + half * 64, start], full.index(stage), rows.index(stage * 2 + half)
                )
                tma.async_copy_global_to_shared(
                    weight_map, [half * N + n, start], full.index(stage), weights.index(stage * 2 + half)
                )
            turn += 1


@gluon.jit
def _multiply(
    out_map, rows, weights, results, full, empty, num_m, num_n, K,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GELU: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One of two warpgroups: 64 rows of every tile of this program."""
    dtype: gl.constexpr = rows.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    result = results.index(WHICH)
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _place(tile, num_m, num_n, GROUP)
        gate = gl.zeros([64, 128], gl.float32, layout)
        up = gl.zeros([64, 128], gl.float32, layout)
        for number in range(gl.cdiv(K, 64)):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), turn // STAGES & 1)
            mine = rows.index(stage * 2 + WHICH)
            gate_sums = hopper.warpgroup_mma(mine, weights.index(stage * 2).permute((1, 0)), gate, is_async=True)
            up_sums = hopper.warpgroup_mma(mine, weights.index(stage * 2 + 1).permute((1, 0)), up, is_async=True)
            # All but these two are done: what the turn before has read may be overwritten.
            gate, up = hopper.warpgroup_mma_wait(2, deps=[gate_sums, up_sums])
            mbarrier.arrive(empty.index((turn - 1) % STAGES), pred=number > 0)
            turn += 1
        gate, up = hopper.warpgroup_mma_wait(0, deps=[gate, up])
        mbarrier.arrive(empty.index((turn - 1) % STAGES))
        rounded = gate.to(dtype).to(gl.float32)
        if GELU:  # noqa: SIM108
            inner = 1.5957691216057308 * (rounded + 0.044715 * rounded * rounded * rounded)
        else:
            inner = rounded
        # Step by step as gated.activate, whose bits these are.
        activated = rounded * (1.0 / (1.0 + gl.exp2(gl.maximum(inner, -80.0) * -1.4426950408889634)))
        found = activated.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
        tma.store_wait(0)
        result.store(found.to(dtype))
        hopper.fence_async_shared()
        tma.async_copy_shared_to_global(out_map, [m + WHICH * 64, n], result)
    tma.store_wait(0)


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@gluon.jit(do_not_specialize=["M"])
def _gated_many(
    out_map, rows_map, weight_map, M, N, K,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GELU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program: every so many-th tile of 128 rows by 128 outputs. Maps in boxes of 64 x 128, 64 x 64 and 128 x 64."""
    let_next_start(PDL)
    dtype: gl.constexpr = out_map.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(dtype, [2 * STAGES, 64, 64], shared)
    weights = gl.allocate_shared_memory(dtype, [2 * STAGES, 128, 64], shared)
    results = gl.allocate_shared_memory(dtype, [2, 64, 128], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    num_m = gl.cdiv(M, 128)
    num_n = gl.cdiv(N, 128)
    gl.warp_specialize(
        [
            (_multiply, (out_map, rows, weights, results, full, empty, num_m, num_n, K, STAGES, GROUP, GELU, 0)),
            (_multiply, (out_map, rows, weights, results, full, empty, num_m, num_n, K, STAGES, GROUP, GELU, 1)),
            (_fetch, (
                rows_map, weight_map, rows, weights, full, empty, num_m, num_n, N, K, STAGES, GROUP, PDL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `gated_many` computes it, and sooner than cuBLAS and a kernel for the gate (1.03 to 1.19 times as fast
    on an H100: benchmarks/gpu_gated.py)."""
    num_rows, outputs = len(x), len(weight) // 2
    if num_rows < _FEWEST or x.dtype.itemsize != 2 or not is_hopper(x.device):
        return False
    whole = outputs % OUTPUTS == 0 and x.shape[1] % 8 == 0 and weight.is_contiguous() and x.stride(1) == 1
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return whole and aligned and share_of_use(num_rows, outputs, num_processors(x.device)) >= _USE


def share_of_use(num_rows: int, outputs: int, processors: int) -> float:
    """Of what the multiprocessors could multiply meanwhile."""
    blocks = triton.cdiv(num_rows, ROWS)
    tiles = blocks * triton.cdiv(outputs, OUTPUTS)
    turns = triton.cdiv(tiles, processors)
    return float(tiles / (turns * processors) * num_rows / (blocks * ROWS))


def gated_many(x: Tensor, weight: Tensor, gelu: bool) -> Tensor:
    """x [M, K] times weight [N, K], gated: [M, N / 2], as gated.gated of the product."""
    (num_rows, size), outputs = x.shape, len(weight) // 2
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    tiles = triton.cdiv(num_rows, ROWS) * triton.cdiv(outputs, OUTPUTS)
    launch.on(_gated_many, (min(tiles, num_processors(x.device)),))(
        TensorDescriptor(out, [num_rows, outputs], [outputs, 1], [64, OUTPUTS], layout),
        TensorDescriptor(x, [num_rows, size], [x.stride(0), 1], [64, INPUTS], layout),
        TensorDescriptor(weight, [2 * outputs, size], [size, 1], [OUTPUTS, INPUTS], layout),
        num_rows, outputs, size,
        STAGES=STAGES, GROUP=GROUP, GELU=gelu, PDL=launch.dependent(), **launch.options(4),
    )  # fmt: skip
    return out
