"""Products of a few rows in which every output is one sum (one_sum.py), on Hopper GPUs: the weight is on its way while
the kernel before ends. Written in Gluon.

Up to three warps of a program have 16 outputs each (of a gated layer, of both halves), so that outputs are divided
evenly over the multiprocessors. They multiply the weight by the rows (mma.sync m16n8k16), inputs in ascending order.
One warp fetches tiles of the weight with the copy engine (TMA) into a ring in shared memory, without regard to the
kernel before: weights do not change. Others wait for that kernel, and fetch the rows.

Knows no layer.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gluon_launch import let_next_start, wait_for_inputs
from pagemill.model.kernels.triton.one_sum_choices import EarlyTiles, early_class

OUTPUTS = 16
"""Of a warp, of each half where gated: rows of an instruction of the tensor cores."""
REGISTERS = 96
"""Of a thread, so that small kernels have room beside it."""


@gluon.jit
def _fetch_weights(weight_map, rings, N, num_tiles, SIZES: gl.constexpr, GATED: gl.constexpr):
    """One warp: the weight of each turn of each tile of this program."""
    K: gl.constexpr = SIZES[0]
    INPUTS: gl.constexpr = SIZES[1]
    WARPS: gl.constexpr = SIZES[3]
    STAGES: gl.constexpr = SIZES[4]
    TURNS: gl.constexpr = (K + INPUTS - 1) // INPUTS
    GROUPS: gl.constexpr = WARPS * (2 if GATED else 1)
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        for number in range(TURNS):
            stage = turn % STAGES
            full = rings[2].index(stage)
            mbarrier.wait(rings[3].index(stage), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(full, GROUPS * 16 * INPUTS * 2)
            for group in gl.static_range(GROUPS):
                output = (tile * WARPS + group % WARPS) * 16
                if group >= WARPS:
                    output += N
                tma.async_copy_global_to_shared(
                    weight_map, [output, number * INPUTS], full, rings[0].index(stage * GROUPS + group)
                )
            turn += 1


@gluon.jit
def _fetch_rows(rows_map, rings, num_tiles, SIZES: gl.constexpr, PDL: gl.constexpr):
    """The rows of each turn."""
    INPUTS: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[4]
    TURNS: gl.constexpr = (SIZES[0] + INPUTS - 1) // INPUTS
    wait_for_inputs(PDL)
    turn = gl.to_tensor(0)
    for _ in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        for number in range(TURNS):
            stage = turn % STAGES
            full = rings[2].index(stage)
            mbarrier.wait(rings[3].index(stage), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(full, SIZES[2] * INPUTS * 2)
            tma.async_copy_global_to_shared(rows_map, [0, number * INPUTS], full, rings[1].index(stage))
            turn += 1


@gluon.jit
def _multiply(one, which, SIZES: gl.constexpr, END: gl.constexpr):
    """One warp: the `which`-th 16 outputs of every tile of this program."""
    out, bias, rings, M, N, num_tiles = one
    ROWS: gl.constexpr = SIZES[2]
    WARPS: gl.constexpr = SIZES[3]
    STAGES: gl.constexpr = SIZES[4]
    TURNS: gl.constexpr = (SIZES[0] + SIZES[1] - 1) // SIZES[1]
    HAS_BIAS: gl.constexpr = END[0]
    GATED: gl.constexpr = END[1]
    GELU: gl.constexpr = END[2]
    GROUPS: gl.constexpr = WARPS * (2 if GATED else 1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    dtype: gl.constexpr = out.dtype.element_ty
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        sums = gl.zeros([16, ROWS], gl.float32, layout)
        up_sums = sums
        for _ in range(TURNS):
            stage = turn % STAGES
            mbarrier.wait(rings[2].index(stage), turn // STAGES & 1)
            rows = rings[1].index(stage).permute((1, 0)).load(right)
            weights = rings[0].index(stage * GROUPS + which).load(left)
            if GATED:
                up_weights = rings[0].index(stage * GROUPS + WARPS + which).load(left)
                up_sums = mma_v2(up_weights, rows, up_sums)
            sums = mma_v2(weights, rows, sums)
            gl.thread_barrier()
            mbarrier.arrive(rings[3].index(stage))
            turn += 1
        output = (tile * WARPS + which) * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        if HAS_BIAS:
            sums += gl.load(bias + output, output < N, 0.0).to(gl.float32)[:, None]
            if GATED:
                up_sums += gl.load(bias + N + output, output < N, 0.0).to(gl.float32)[:, None]
        if GATED:
            gate = sums.to(dtype).to(gl.float32)
            inner = gate
            if GELU:
                inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            # Step by step as gated.activate, whose bits these are.
            activated = gate * (1.0 / (1.0 + gl.exp2(gl.maximum(inner, -80.0) * -1.4426950408889634)))
            sums = activated.to(dtype).to(gl.float32) * up_sums.to(dtype).to(gl.float32)
        places = out + row.to(gl.int64)[None, :] * N + output[:, None]
        gl.store(places, sums.to(dtype), (row < M)[None, :] & (output < N)[:, None])


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@gluon.jit(do_not_specialize=["M"])
def _early(
    out, rows_map, weight_map, bias, M, N, num_tiles,
    K: gl.constexpr, INPUTS: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program: every so many-th tile of 16 * WARPS outputs. Maps in boxes of ROWS and of 16, by INPUTS."""
    let_next_start(PDL)
    GROUPS: gl.constexpr = WARPS * (2 if GATED else 1)
    ring = gl.allocate_shared_memory(weight_map.dtype, [STAGES * GROUPS, 16, INPUTS], weight_map.layout)
    rows = gl.allocate_shared_memory(weight_map.dtype, [STAGES, ROWS, INPUTS], rows_map.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=WARPS)
    rings = (ring, rows, full, empty)
    one = (out, bias, rings, M, N, num_tiles)
    SIZES: gl.constexpr = (K, INPUTS, ROWS, WARPS, STAGES)
    END: gl.constexpr = (HAS_BIAS, GATED, GELU)
    if WARPS == 1:
        gl.warp_specialize(
            [
                (_fetch_rows, (rows_map, rings, num_tiles, SIZES, PDL)),
                (_fetch_weights, (weight_map, rings, N, num_tiles, SIZES, GATED)),
                (_multiply, (one, 0, SIZES, END)),
            ],
            [1, 1],
            [24, 128],
        )
    elif WARPS == 2:
        gl.warp_specialize(
            [
                (_fetch_rows, (rows_map, rings, num_tiles, SIZES, PDL)),
                (_fetch_weights, (weight_map, rings, N, num_tiles, SIZES, GATED)),
                (_multiply, (one, 0, SIZES, END)),
                (_multiply, (one, 1, SIZES, END)),
            ],
            [1, 1, 1],
            [24, 128, 128],
        )
    else:
        gl.warp_specialize(
            [
                (_fetch_rows, (rows_map, rings, num_tiles, SIZES, PDL)),
                (_fetch_weights, (weight_map, rings, N, num_tiles, SIZES, GATED)),
                (_multiply, (one, 0, SIZES, END)),
                (_multiply, (one, 1, SIZES, END)),
                (_multiply, (one, 2, SIZES, END)),
            ],
            [1, 1, 1, 1],
            [24, 128, 128, 128],
        )


def early_rows(
    x: Tensor, weight: Tensor, tiles: EarlyTiles, bias: Tensor | None, gate: str | None, out_dtype: torch.dtype,
    num_processors: int,
) -> Tensor:  # fmt: skip
    """[M, K] times [N, K] -> [M, N], with a gate [M, N / 2]; M up to MOST_EARLY; rows of x and weight
    begin at multiples of 16 bytes."""
    (num_rows, size), stacked = x.shape, len(weight)
    num_outputs = stacked // (1 if gate is None else 2)
    out = torch.empty(num_rows, num_outputs, dtype=out_dtype, device=x.device)
    rows = early_class(num_rows)
    num_tiles = triton.cdiv(num_outputs, OUTPUTS * tiles.warps)
    shared = gl.NVMMASharedLayout(128, 16, 2)
    launch.on(_early, (min(num_tiles, num_processors),))(
        out, TensorDescriptor(x, [num_rows, size], [x.stride(0), 1], [rows, tiles.inputs], shared),
        TensorDescriptor(weight, [stacked, size], [size, 1], [OUTPUTS, tiles.inputs], shared),
        out if bias is None else bias, num_rows, num_outputs, num_tiles,
        K=size, INPUTS=tiles.inputs, ROWS=rows, WARPS=tiles.warps, STAGES=tiles.stages,
        HAS_BIAS=bias is not None, GATED=gate is not None, GELU=gate == "gelu_tanh", PDL=launch.dependent(),
        maxnreg=REGISTERS, **launch.options(),
    )  # fmt: skip
    return out
