"""Everything between two attentions of a decoder layer, for 1 to 8 rows and weights of 4-bit integers, as one kernel:
the o projection, the residual's sum and norm, gate and up, the activation, down, the next sum and norm, and qkv.

128 programs, one on each multiprocessor. Each owns outputs of every product and all their inputs, so that nothing is
summed between programs. The weights pass through a ring in shared memory: one warp asks for tiles (TMA), without
regard to what the others wait for, but never for more than a few at a time, or what programs tell each other
would wait behind them.

Programs do not meet: what one writes for the others, inputs of the next product and sums of squares, is never 0, and
what was not written yet is (packed_layer_products.py). There are two copies of that memory, for launches by turns, and
a launch sets the copy of the next one to 0. A norm's factor multiplies the sums, so that its inputs are written once,
by the program that owns them.

Two of these kernels at once could each have half of the multiprocessors, and wait for ever for the other half of their
programs: after some seconds they stop with an error. An engine has one stream for all its steps, so it never runs two;
two engines must not share a GPU within one process. A cooperative launch would rule it out, but a model seems to be
slower with it (docs/benchmarks.md).

Written in Gluon. Knows shapes, not layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagemill.model.kernels.packed import Packed
from pagemill.model.kernels.packed_layer import HIDDEN, MAX_ROWS, PROGRAMS, LayerWeights
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gluon_launch import let_next_start, wait_for_inputs
from pagemill.model.kernels.triton.packed_layer_products import ARGS, barriers, places, products

NUM_WARPS = 8
STAGES = {1: 6, 2: 6, 4: 5, 8: 4}
"""By rows: tiles of 16 outputs by 4,096 inputs in the ring, 34 KiB each, beside 9 KiB for each row."""
LIMIT = 2
"""Tiles that a program waits for at a time."""
POLLS = 1 << 22
"""After so many looks at inputs, some seconds, a program stops the kernel with an error."""


@gluon.jit
def _copy(words, scales, tile, first, quad, stage, scale_stage, full):
    tma.async_copy_global_to_shared(words, [first, tile % 4 * 8, 0], full, stage)
    tma.async_copy_global_to_shared(scales, [quad * 32, tile * 16], full, scale_stage)


@gluon.jit
def _fetch(
    weights, rings, SIZES: gl.constexpr, LAST: gl.constexpr, STAGES: gl.constexpr, LIMIT: gl.constexpr
):  # fmt: skip
    """One warp: the tile of each step, and its scales, not before the LIMIT-th tile before is there; also before
    earlier kernels have ended, which write no weights. SIZES: outputs of o, inner, inputs of o, outputs of qkv."""
    program = gl.program_id(0)
    OWN_O: gl.constexpr = SIZES[0] // 2048
    OWN_GATES: gl.constexpr = SIZES[1] // 2048
    OWN_QKV: gl.constexpr = SIZES[3] // 2048
    AFTER_O: gl.constexpr = OWN_O * (SIZES[2] // 4096)
    AFTER_GATES: gl.constexpr = AFTER_O + 2 * OWN_GATES
    AFTER_DOWN: gl.constexpr = AFTER_GATES + OWN_O * ((SIZES[1] + 4095) // 4096)
    for step in range(LAST):
        stage = rings[0].index(step % STAGES)
        scales = rings[1].index(step % STAGES)
        full = rings[3].index(step % STAGES)
        mbarrier.wait(rings[3].index(STAGES + step % STAGES), (step // STAGES & 1) ^ 1)
        if step >= LIMIT:
            before = step - LIMIT
            mbarrier.wait(rings[3].index(before % STAGES), before // STAGES & 1)
        mbarrier.expect(full, 34 << 10)
        if step < AFTER_O:
            tile = program * OWN_O + step % OWN_O
            quad = step // OWN_O
            first = tile // 4 * (SIZES[2] // 128) + quad * 32
            _copy(weights[0], weights[1], tile, first, quad, stage, scales, full)
        elif step < AFTER_GATES:
            tile = program * OWN_GATES + step - AFTER_O
            if step >= AFTER_O + OWN_GATES:
                tile += SIZES[1] // 16 - OWN_GATES
            _copy(weights[2], weights[3], tile, tile // 4 * (SIZES[0] // 128), 0, stage, scales, full)
        elif step < AFTER_DOWN:
            tile = program * OWN_O + (step - AFTER_GATES) % OWN_O
            quad = (step - AFTER_GATES) // OWN_O
            first = tile // 4 * (SIZES[1] // 128) + quad * 32
            _copy(weights[4], weights[5], tile, first, quad, stage, scales, full)
        else:
            tile = program * OWN_QKV + step - AFTER_DOWN
            _copy(weights[6], weights[7], tile, tile // 4 * (SIZES[0] // 128), 0, stage, scales, full)


@gluon.constexpr_function
def _sums_layout(rows, w):
    """Of [slots, warps, 16 outputs, rows]."""
    near = min(rows, 2)
    return gl.BlockedLayout([1, 1, 1, 1], [2 // near, 1, 16, near], [w, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _lanes(layout, axis):
    """The layout of a vector along an axis of three."""
    for other in (2, 1, 0):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _collect(rings, first: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr):
    """[COUNT, 16, ROWS]: the outputs of COUNT slots, of all inputs."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    view = rings[2]._reinterpret(gl.float32, [16, W, 16, ROWS], flat)
    return gl.sum(view.slice(first, COUNT).load(_sums_layout(ROWS, W)), 1)


@gluon.jit
def _numbers(COUNT: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr):
    """Of the elements of _collect: number of the output, [COUNT, 16, 1], and of the row, [1, 1, ROWS]."""
    layout: gl.constexpr = gl.SliceLayout(1, _sums_layout(ROWS, W))
    slot = gl.arange(0, COUNT, layout=_lanes(layout, 0))
    inside = gl.arange(0, 16, layout=_lanes(layout, 1))
    row = gl.arange(0, ROWS, layout=_lanes(layout, 2))
    return slot[:, None, None] * 16 + inside[None, :, None], row[None, None, :]


@gluon.jit
def _own(values, size: gl.constexpr, M, program, OWN: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr):
    """float32: a program's elements of values [M, size], or with size 0 [1, ..]."""
    output, row = _numbers(OWN, ROWS, W)
    output += program * (16 * OWN)
    return gl.load(values + gl.minimum(row, M - 1) * size + output, cache_modifier=".cg").to(gl.float32)


@gluon.jit
def _add(
    result, old, weight, x, squares, residual, M, program,
    OWN: gl.constexpr, HIDDEN: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The residual's sum, in its place, times the norm's weight in x, and the sums of its squares, of 16 outputs each.
    Gives the sum."""
    output, row = _numbers(OWN, ROWS, W)
    output += program * (16 * OWN)
    known = (row < M) & (output >= 0)
    total = (result.to(gl.bfloat16).to(gl.float32) + old).to(gl.bfloat16)
    wide = total.to(gl.float32)
    gl.store(x + row * HIDDEN + output, _scaled(wide * weight, output), known)
    gl.store(residual + row * HIDDEN + output, total, known)
    sums = gl.sum(wide * wide, 1)
    sums = gl.where(sums < 1e-30, 1e-30, sums)  # never 0, as inputs
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, _sums_layout(ROWS, W)))
    slot = program * OWN + gl.arange(0, OWN, layout=gl.SliceLayout(1, layout))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    gl.store(squares + rows[None, :] * (HIDDEN // 16) + slot[:, None], sums, (rows < M)[None, :] & (slot >= 0)[:, None])
    return wide


@gluon.jit
def _scaled(values, output):
    """As inputs of products are written: a power of two times as large, and at least 2, so never 0."""
    values = values * gl.where(output // 32 % 2 == 1, 1152921504606846976.0, 18446744073709551616.0)
    return gl.where(gl.abs(values) < 2.0, 2.0, values).to(gl.bfloat16)


@gluon.jit
def _reset(other, program, SIZES: gl.constexpr, W: gl.constexpr):
    """What this program will write in the next launch: 0."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    OWN: gl.constexpr = SIZES[0] // 2048
    GATES: gl.constexpr = 8 * (SIZES[1] // 2048)
    lane = gl.arange(0, 128 * OWN, layout=layout)
    line = lane // (8 * OWN) * (SIZES[0] // 2)
    gl.store(other + line + program * (8 * OWN) + lane % (8 * OWN), gl.zeros_like(lane))
    lane = gl.arange(0, 512, layout=layout)
    line = 8 * SIZES[0] + lane // 64 * (SIZES[1] // 2)
    gl.store(other + line + program * GATES + lane % 64, gl.zeros_like(lane), lane % 64 < GATES)
    lane = gl.arange(0, 16 * OWN, layout=layout)
    line = 8 * SIZES[0] + 4 * SIZES[1] + lane // OWN * (SIZES[0] // 16)
    gl.store(other + line + program * OWN + lane % OWN, gl.zeros_like(lane))


@gluon.jit
def _factor(rings, eps, HIDDEN: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr):
    """[1, 1, ROWS]: that of a norm, from sums of squares."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, W], [1, 0])
    factor = gl.rsqrt(gl.sum(rings[4].load(layout), 1) / HIDDEN + eps)
    factor = gl.convert_layout(factor, _lanes(gl.SliceLayout(1, _sums_layout(ROWS, W)), 2))
    return factor[None, None, :]


@gluon.jit
def _gate_up(
    factor, middle, M, program, rings, SIZES: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """After the products of gate and up: their product, [M, INNER]."""
    OWN: gl.constexpr = SIZES[1] // 2048
    gate = _collect(rings, 0, 8, ROWS, W) * factor
    up = _collect(rings, 8, 8, ROWS, W) * factor
    activated = gate / (1.0 + gl.exp(gl.minimum(-gate, 80.0))) * up
    output, row = _numbers(8, ROWS, W)
    known = (row < M) & (output < 16 * OWN)
    output += program * (16 * OWN)
    gl.store(middle + row * SIZES[1] + output, _scaled(activated, output), known)


@gluon.jit
def _qkv(factor, out, M, program, rings, SIZES: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr):
    """After the last product."""
    OWN: gl.constexpr = SIZES[3] // 2048
    found = _collect(rings, 0, 4, ROWS, W) * factor
    output, row = _numbers(4, ROWS, W)
    places = out + row * SIZES[3] + (program * (16 * OWN) + output)
    gl.store(places, found.to(gl.bfloat16), (row < M) & (output < 16 * OWN))


@gluon.jit
def _pass(attended, x, middle, number, SIZES: gl.constexpr):
    """Of o, then gate and up, then down, then qkv: where a quad of inputs is, how many inputs there are in all, which
    quad it is, of how many tiles, and how many places for sums are skipped after half of them."""
    GATE: gl.constexpr = SIZES[2] // 4096
    QKV: gl.constexpr = GATE + 1 + (SIZES[1] + 4095) // 4096
    source = attended.to(gl.int64) + number * 8192
    size = SIZES[2]
    quad = number
    count = SIZES[0] // 2048
    skipped = 0
    if number >= GATE:
        source = x.to(gl.int64)
        size = SIZES[0]
        quad = 0
        if number == GATE:
            count = SIZES[1] // 1024
            skipped = 8 - SIZES[1] // 2048
        elif number < QKV:
            quad = number - GATE - 1
            source = middle.to(gl.int64) + quad * 8192
            size = SIZES[1]
        else:
            source += 16 * SIZES[0]
            count = SIZES[3] // 2048
    return source, size, quad, count, skipped


@gluon.jit
def _compute(
    out, attended, residual, M, turns, scratch, norms, rings, passes,
    SIZES: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, POLLS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """All warps but the one that fetches. scratch, int32, twice: x of gate and up and of qkv, [8, HIDDEN / 2] each,
    gate times up, [8, INNER / 2], sums of squares, twice [8, HIDDEN / 16] float32. passes: how many quads of inputs
    there are in all, in a variable, so that no code is there twice."""
    wait_for_inputs(PDL)
    program = gl.program_id(0)
    turn = gl.load(turns + program, volatile=True)
    half: gl.constexpr = gl.pointer_type(gl.bfloat16)
    single: gl.constexpr = gl.pointer_type(gl.float32)
    LENGTH: gl.constexpr = 9 * SIZES[0] + 4 * SIZES[1]
    OWN: gl.constexpr = SIZES[0] // 2048
    GATE: gl.constexpr = SIZES[2] // 4096
    QKV: gl.constexpr = GATE + 1 + (SIZES[1] + 4095) // 4096
    TEXT: gl.constexpr = products(ROWS, W, STAGES, SIZES[1] % 4096 != 0)
    x = scratch + turn * LENGTH
    middle = x + 8 * SIZES[0]
    squares = (middle + 4 * SIZES[1]).to(single, bitcast=True)
    old = _own(residual, SIZES[0], M, program, OWN, ROWS, W)
    weight = _own(norms[0], 0, M, program, OWN, ROWS, W)
    step = 0
    for number in range(passes):
        source, size, quad, count, skipped = _pass(attended, x, middle, number, SIZES)
        normed = (number == GATE) | (number == QKV)
        given = number >= GATE
        flags = given.to(gl.int32) + (quad > 0).to(gl.int32) * 2 + normed.to(gl.int32) * 4
        place = squares.to(gl.int64) + (number == QKV).to(gl.int32) * (2 * SIZES[0])
        args = [source, M - 1, POLLS, place, size * 2, size // 128 - quad * 32, count, step, skipped, flags]
        gl.inline_asm_elementwise(TEXT, ARGS, args, dtype=gl.int32, is_pure=False, pack=1)
        gl.thread_barrier()
        step += count
        if normed:
            factor = _factor(rings, gl.where(number == GATE, norms[2], norms[3]), SIZES[0], ROWS, W)
            if number == GATE:
                _gate_up(factor, middle.to(half, bitcast=True), M, program, rings, SIZES, ROWS, W)
                weight = _own(norms[1], 0, M, program, OWN, ROWS, W)
            else:
                _qkv(factor, out, M, program, rings, SIZES, ROWS, W)
        elif (number == GATE - 1) | (number == QKV - 1):
            result = _collect(rings, 0, OWN, ROWS, W)
            second = given.to(gl.int32)
            target = (x + second * (4 * SIZES[0])).to(half, bitcast=True)
            sums = squares + second * (SIZES[0] // 2)
            old = _add(result, old, weight, target, sums, residual, M, program, OWN, SIZES[0], ROWS, W)
            if number < GATE:
                # The launch before, which used the other half, has ended; it is read again by the next one.
                _reset(scratch + (1 - turn) * LENGTH, program, SIZES, W)
                gl.store(turns + program, 1 - turn)
        gl.thread_barrier()  # all have read the sums


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@gluon.jit(do_not_specialize=["M", "passes"])
def _packed_layer(
    out, attended, residual, M, passes, turns, scratch, norm1, norm2, eps1, eps2,
    words0, scales0, words1, scales1, words2, scales2, words3, scales3,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, MIXED: gl.constexpr, QKV: gl.constexpr, STAGES: gl.constexpr,
    LIMIT: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, POLLS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Words in boxes of 32 x 8 x 32, scales of 32 x 16."""
    SIZES: gl.constexpr = (HIDDEN, INNER, MIXED, QKV)
    LAST: gl.constexpr = HIDDEN // 2048 * (MIXED // 4096 + (INNER + 4095) // 4096) + INNER // 1024 + QKV // 2048
    PLACES: gl.constexpr = places(STAGES, ROWS, W)
    let_next_start(PDL)
    # One piece, which begins where shared memory does: PTX has no other way to know where things are.
    memory = gl.allocate_shared_memory(gl.int32, [PLACES[4], 8, 32], gl.NVMMASharedLayout(128, 32, 2))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    ring = memory._reinterpret(gl.int32, [STAGES, 32, 8, 32], words0.layout)
    scale_ring = memory.index(PLACES[0])._reinterpret(gl.float32, [STAGES, 32, 16], scales0.layout)
    sums = memory.index(PLACES[1])._reinterpret(gl.float32, [16, W, 16, ROWS], plain)
    bars = memory.index(PLACES[2])._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    squares = memory.index(PLACES[3])._reinterpret(gl.float32, [ROWS, 256], lines)
    BARRIERS: gl.constexpr = barriers(STAGES, ROWS, W)
    gl.inline_asm_elementwise(BARRIERS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.thread_barrier()
    rings = (ring, scale_ring, sums, bars, squares)
    weights = (words0, scales0, words1, scales1, words2, scales2, words3, scales3)
    norms = (norm1, norm2, eps1, eps2)
    gl.warp_specialize(
        [
            (_compute, (
                out, attended, residual, M, turns, scratch, norms, rings, passes, SIZES, STAGES, ROWS, W,
                POLLS, PDL,
            )),
            (_fetch, (weights, rings, SIZES, LAST, STAGES, LIMIT)),
        ],
        [1],
        [24],
    )  # fmt: skip


def _descriptors(weight: Packed) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Its words, by tiles of 64 outputs and span, in lines of 128 bytes, and its scales."""
    words = weight.words.view(torch.int32).view(-1, 32, 32)
    scales = weight.scales
    return (
        TensorDescriptor(words, list(words.shape), [1024, 32, 1], [32, 8, 32], gl.NVMMASharedLayout(128, 32, 3)),
        TensorDescriptor(scales, list(scales.shape), [scales.shape[1], 1], [32, 16], gl.NVMMASharedLayout(64, 32, 2)),
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """One place in a model; one kernel at a time uses its memory."""

    weights: LayerWeights
    maps: tuple[TensorDescriptor, ...]
    memory: Tensor
    """int32, twice: what programs tell each other, see `_compute`; all 0 at first."""
    turns: Tensor
    """[PROGRAMS] int32: which half of `memory` the next launch uses, 0 or 1."""


def prepare(weights: LayerWeights) -> Prepared:
    """Descriptors of a layer's weights, and memory, as `packed_layer` takes them."""
    device = weights.o.words.device
    size = (9 * HIDDEN + 4 * weights.down.num_inputs) * MAX_ROWS // 8
    maps = tuple(found for one in weights.linears for found in _descriptors(one))
    memory = torch.zeros(2 * size, dtype=torch.int32, device=device)
    return Prepared(weights, maps, memory, torch.zeros(PROGRAMS, dtype=torch.int32, device=device))


def _passes(weights: LayerWeights) -> int:
    """Quads of inputs of all products."""
    return weights.o.num_inputs // 4096 + 2 + -(-weights.down.num_inputs // 4096)


def packed_layer(
    out: Tensor, attended: Tensor, residual: Tensor, layer: Prepared, *,
    num_warps: int = NUM_WARPS, stages: int | None = None, limit: int = LIMIT, polls: int = POLLS,
) -> None:  # fmt: skip
    """attended [T, MIXED] and residual [T, HIDDEN], bfloat16 with rows side by side, T up to MAX_ROWS, -> out [T, QKV];
    the residual's sum in its place."""
    num_rows = len(attended)
    rows = launch.power_of_two(num_rows)
    weights = layer.weights
    launch.on(_packed_layer, (PROGRAMS,))(
        out, attended, residual, num_rows, _passes(weights), layer.turns, layer.memory, weights.norm1, weights.norm2,
        *weights.eps, *layer.maps,
        HIDDEN=HIDDEN, INNER=weights.down.num_inputs, MIXED=weights.o.num_inputs, QKV=weights.qkv.num_outputs,
        STAGES=stages or STAGES[rows], LIMIT=limit, ROWS=rows, W=num_warps,
        POLLS=polls, PDL=launch.dependent(), **launch.options(num_warps),
    )  # fmt: skip
