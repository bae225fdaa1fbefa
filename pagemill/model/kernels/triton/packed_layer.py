"""Everything between two attentions of a decoder layer, for 1 to 8 rows and weights of 4-bit integers, as one kernel:
the o projection, the residual's sum and norm, gate and up, the activation, down, the next sum and norm, and qkv.

128 programs, one on each multiprocessor, which meet at barriers over the whole GPU. Each owns outputs of every product
and all their inputs, so that nothing is summed between programs. The weights pass through a ring in shared memory: one
warp asks for tiles (TMA) without regard to the barriers, so that weights keep coming while the others wait for inputs.

Integers are multiplied by the tensor cores, 16 outputs by 128 inputs a warp at a time (packed_layer_asm.py); warps have
inputs of their own. The 8 columns of the other operand are the rows, each as often as it fits. A norm's factor
multiplies the sums, so that its inputs are written once, by the program that owns them.

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
from pagemill.model.kernels.triton.packed_layer_asm import (
    FIRST_SUM,
    FIRST_SUM_ARGS,
    MEET,
    MEET_ARGS,
    PRODUCT,
    PRODUCT_ARGS,
)

NUM_WARPS = 8
STAGES = {1: 4, 2: 4, 4: 4, 8: 4}
"""By rows: tiles of 16 outputs by 4,096 inputs in the ring, 34 KiB each, beside 8 KiB of sums for each row."""
POLLS = 1 << 22
"""After so many looks at a barrier, some seconds, a program stops the kernel with an error."""


@gluon.jit
def _meet(flags, program, turn, POLLS: gl.constexpr):
    """All programs have come here, and what they wrote before can be read. flags: [PROGRAMS] turns."""
    gl.thread_barrier()
    gl.inline_asm_elementwise(
        MEET, MEET_ARGS, [flags.to(gl.int64), program, turn, POLLS], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.thread_barrier()


@gluon.constexpr_function
def _words_layout(w):
    """Of [warps, 16 outputs, 16 pairs of words]: a thread has 4 pairs of two outputs."""
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [w, 1, 1], [2, 1, 0])


@gluon.jit
def _copy(words, scales, tile, first, quad, stage, scale_stage, full):
    tma.async_copy_global_to_shared(words, [first, tile % 4 * 8, 0], full, stage)
    tma.async_copy_global_to_shared(scales, [quad * 32, tile * 16], full, scale_stage)


@gluon.jit
def _fetch(
    weights, rings, SIZES: gl.constexpr, LAST: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """One warp: the tile of each step, and its scales. SIZES: outputs of o, inner, inputs of o, outputs of qkv."""
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
        mbarrier.wait(rings[4].index(step % STAGES), (step // STAGES & 1) ^ 1)
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


@gluon.jit
def _inputs(x, size: gl.constexpr, quad, s: gl.constexpr, M, ROWS: gl.constexpr, W: gl.constexpr):
    """x [M, size / 2] int32, pairs: of the s-th span of each warp, of two planes each, twice [W, 16, 16]."""
    layout: gl.constexpr = _words_layout(W)
    span = quad * 32 + s * W + gl.arange(0, W, layout=_lanes(layout, 0))
    output = gl.arange(0, 16, layout=_lanes(layout, 1))
    pair = gl.arange(0, 16, layout=_lanes(layout, 2))
    row = gl.minimum(output % ROWS, M - 1)
    planes = row * (size // 32) + output // 8
    places = x + ((span * 4)[:, None, None] + planes[None, :, None]) * 16 + pair[None, None, :]
    if size % 4096 == 0:
        low = gl.load(places, cache_modifier=".cg")
        high = gl.load(places + 32, cache_modifier=".cg")
    else:  # beyond the last inputs, zeros
        known = (span < size // 128)[:, None, None]
        low = gl.load(places, known, 0, cache_modifier=".cg")
        high = gl.load(places + 32, known, 0, cache_modifier=".cg")
    first = gl.inline_asm_elementwise(FIRST_SUM, FIRST_SUM_ARGS, [low, high], dtype=gl.float32, is_pure=False, pack=8)
    return low, high, first


@gluon.jit
def _of_rows(sums, ROWS: gl.constexpr, W: gl.constexpr):
    """[W, 16, 16] -> [W, 16, ROWS]. Of 16 columns 4 are a thread's: two sums of two rows."""
    if ROWS == 1:
        result = gl.expand_dims(gl.sum(sums, 2) * 0.125, 2)
    elif ROWS == 2:
        result = gl.sum(gl.reshape(sums, [W, 16, 8, 2]), 2) * 0.25
    elif ROWS == 4:
        halves = gl.sum(gl.reshape(sums, [W, 16, 4, 2, 2]), 3)
        result = gl.sum(gl.reshape(halves, [W, 16, 2, 4]), 2) * 0.5
    else:
        result = gl.reshape(gl.sum(gl.reshape(sums, [W, 16, 4, 2, 2]), 3), [W, 16, 8])
    return result


@gluon.jit
def _multiply(
    x, size: gl.constexpr, quad, first_step, slot, COUNT: gl.constexpr, FOLD: gl.constexpr, M, rings,
    STAGES: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """COUNT steps: the sums of each warp's inputs into rings[2], from `slot` on; from the FOLD-th step on, from 8."""
    layout: gl.constexpr = _words_layout(W)
    flat: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [W, 1, 1], [2, 1, 0])
    inputs0 = _inputs(x, size, quad, 0, M, ROWS, W)
    inputs1 = _inputs(x, size, quad, 1, M, ROWS, W)
    if W == 8:
        inputs = (inputs0, inputs1, _inputs(x, size, quad, 2, M, ROWS, W), _inputs(x, size, quad, 3, M, ROWS, W))
    else:
        inputs = (inputs0, inputs1)  # type: ignore[assignment]
    for number in range(COUNT):
        step = first_step + number
        mbarrier.wait(rings[3].index(step % STAGES), step // STAGES & 1)
        stage = rings[0].index(step % STAGES)
        scales = rings[1].index(step % STAGES)
        sums = gl.zeros([W, 16, 16], gl.float32, layout)
        for s in gl.static_range(32 // W):
            words = gl.reshape(stage.slice(s * W, W).load(flat), [W, 16, 16])
            words = gl.convert_layout(words, layout, assert_trivial=True)
            scale = scales.slice(s * W, W).load(gl.SliceLayout(2, layout))
            args = [words, inputs[s][0], inputs[s][1], inputs[s][2]]
            part = gl.inline_asm_elementwise(PRODUCT, PRODUCT_ARGS, args, dtype=gl.float32, is_pure=False, pack=8)
            sums += part * scale[:, :, None]
        target = slot + number
        if number >= FOLD:
            target += 8 - FOLD
        rings[2].index(target).store(_of_rows(sums, ROWS, W))
        gl.thread_barrier()  # all warps have read the tile
        mbarrier.arrive(rings[4].index(step % STAGES))


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
    gl.store(x + row * HIDDEN + output, (wide * weight).to(gl.bfloat16), known)
    gl.store(residual + row * HIDDEN + output, total, known)
    sums = gl.sum(wide * wide, 1)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, _sums_layout(ROWS, W)))
    slot = program * OWN + gl.arange(0, OWN, layout=gl.SliceLayout(1, layout))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    gl.store(squares + rows[None, :] * (HIDDEN // 16) + slot[:, None], sums, (rows < M)[None, :] & (slot >= 0)[:, None])
    return wide


@gluon.jit
def _squares(squares, M, HIDDEN: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr):
    """[ROWS, HIDDEN / 16]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, W], [1, 0])
    lanes = gl.arange(0, HIDDEN // 16, layout=gl.SliceLayout(0, layout))
    rows = gl.minimum(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), M - 1)
    return gl.load(squares + rows[:, None] * (HIDDEN // 16) + lanes[None, :], cache_modifier=".cg")


@gluon.jit
def _factor(squares, eps, HIDDEN: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr):
    """[1, 1, ROWS]: that of a norm."""
    factor = gl.rsqrt(gl.sum(squares, 1) / HIDDEN + eps)
    factor = gl.convert_layout(factor, _lanes(gl.SliceLayout(1, _sums_layout(ROWS, W)), 2))
    return factor[None, None, :]


@gluon.jit
def _o(
    attended, x, squares, residual, norm, M, program, rings,
    SIZES: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The first product, and the sum after it."""
    OWN: gl.constexpr = SIZES[0] // 2048
    QUADS: gl.constexpr = SIZES[2] // 4096
    old = _own(residual, SIZES[0], M, program, OWN, ROWS, W)
    weight = _own(norm, 0, M, program, OWN, ROWS, W)
    for quad in range(QUADS):
        _multiply(attended, SIZES[2], quad, quad * OWN, quad * OWN, OWN, 99, M, rings, STAGES, ROWS, W)
    result = _collect(rings, 0, OWN, ROWS, W)
    for quad in gl.static_range(1, QUADS):
        result += _collect(rings, quad * OWN, OWN, ROWS, W)
    return _add(result, old, weight, x, squares, residual, M, program, OWN, SIZES[0], ROWS, W)


@gluon.jit
def _gate_up(
    x, squares, eps, middle, M, program, rings,
    SIZES: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Gate and up of the norm, and their product, [M, INNER]."""
    OWN: gl.constexpr = SIZES[1] // 2048
    BEGIN: gl.constexpr = SIZES[0] // 2048 * (SIZES[2] // 4096)
    found = _squares(squares, M, SIZES[0], ROWS, W)
    _multiply(x, SIZES[0], 0, BEGIN, 0, 2 * OWN, OWN, M, rings, STAGES, ROWS, W)
    factor = _factor(found, eps, SIZES[0], ROWS, W)
    gate = _collect(rings, 0, 8, ROWS, W) * factor
    up = _collect(rings, 8, 8, ROWS, W) * factor
    activated = gate / (1.0 + gl.exp(gl.minimum(-gate, 80.0))) * up
    output, row = _numbers(8, ROWS, W)
    places = middle + row * SIZES[1] + (program * (16 * OWN) + output)
    gl.store(places, activated.to(gl.bfloat16), (row < M) & (output < 16 * OWN))


@gluon.jit
def _down(
    middle, old, x, squares, residual, norm, M, program, rings,
    SIZES: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The third product, and the sum after it."""
    OWN: gl.constexpr = SIZES[0] // 2048
    QUADS: gl.constexpr = (SIZES[1] + 4095) // 4096
    BEGIN: gl.constexpr = OWN * (SIZES[2] // 4096) + SIZES[1] // 1024
    weight = _own(norm, 0, M, program, OWN, ROWS, W)
    for quad in range(QUADS):
        _multiply(middle, SIZES[1], quad, BEGIN + quad * OWN, quad * OWN, OWN, 99, M, rings, STAGES, ROWS, W)
    result = _collect(rings, 0, OWN, ROWS, W)
    for quad in gl.static_range(1, QUADS):
        result += _collect(rings, quad * OWN, OWN, ROWS, W)
    _add(result, old, weight, x, squares, residual, M, program, OWN, SIZES[0], ROWS, W)


@gluon.jit
def _qkv(
    out, x, squares, eps, M, program, rings,
    SIZES: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The last product, of the norm."""
    OWN: gl.constexpr = SIZES[3] // 2048
    BEGIN: gl.constexpr = SIZES[0] // 2048 * (SIZES[2] // 4096 + (SIZES[1] + 4095) // 4096) + SIZES[1] // 1024
    squares_now = _squares(squares, M, SIZES[0], ROWS, W)
    _multiply(x, SIZES[0], 0, BEGIN, 0, OWN, 99, M, rings, STAGES, ROWS, W)
    found = _collect(rings, 0, 4, ROWS, W) * _factor(squares_now, eps, SIZES[0], ROWS, W)
    output, row = _numbers(4, ROWS, W)
    places = out + row * SIZES[3] + (program * (16 * OWN) + output)
    gl.store(places, found.to(gl.bfloat16), (row < M) & (output < 16 * OWN))


@gluon.jit
def _compute(
    out, attended, residual, M, flags, scratch, norms, rings,
    SIZES: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, POLLS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """All warps but the one that fetches. scratch, int32: x of gate and up and of qkv, [8, HIDDEN / 2] each, gate times
    up, [8, INNER / 2], sums of squares, twice [8, HIDDEN / 16] float32."""
    wait_for_inputs(PDL)
    program = gl.program_id(0)
    turn = gl.load(flags + program, volatile=True)
    half: gl.constexpr = gl.pointer_type(gl.bfloat16)
    single: gl.constexpr = gl.pointer_type(gl.float32)
    x1 = scratch
    x2 = scratch + 4 * SIZES[0]
    middle = scratch + 8 * SIZES[0]
    squares1 = (scratch + (8 * SIZES[0] + 4 * SIZES[1])).to(single, bitcast=True)
    squares2 = squares1 + SIZES[0] // 2
    halves1 = x1.to(half, bitcast=True)
    halves2 = x2.to(half, bitcast=True)
    total = _o(attended, halves1, squares1, residual, norms[0], M, program, rings, SIZES, STAGES, ROWS, W)
    _meet(flags, program, turn + 1, POLLS)
    _gate_up(x1, squares1, norms[2], middle.to(half, bitcast=True), M, program, rings, SIZES, STAGES, ROWS, W)
    _meet(flags, program, turn + 2, POLLS)
    _down(middle, total, halves2, squares2, residual, norms[1], M, program, rings, SIZES, STAGES, ROWS, W)
    _meet(flags, program, turn + 3, POLLS)
    _qkv(out, x2, squares2, norms[3], M, program, rings, SIZES, STAGES, ROWS, W)


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@gluon.jit(do_not_specialize=["M"])
def _packed_layer(
    out, attended, residual, M, flags, scratch, norm1, norm2, eps1, eps2,
    words0, scales0, words1, scales1, words2, scales2, words3, scales3,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, MIXED: gl.constexpr, QKV: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, W: gl.constexpr, POLLS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Words in boxes of 32 x 8 x 32, scales of 32 x 16."""
    SIZES: gl.constexpr = (HIDDEN, INNER, MIXED, QKV)
    LAST: gl.constexpr = HIDDEN // 2048 * (MIXED // 4096 + (INNER + 4095) // 4096) + INNER // 1024 + QKV // 2048
    let_next_start(PDL)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, 32, 8, 32], words0.layout)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 32, 16], scales0.layout)
    sums = gl.allocate_shared_memory(gl.float32, [16, W, 16, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    rings = (ring, scale_ring, sums, full, empty)
    weights = (words0, scales0, words1, scales1, words2, scales2, words3, scales3)
    norms = (norm1, norm2, eps1, eps2)
    gl.warp_specialize(
        [
            (_compute, (
                out, attended, residual, M, flags, scratch, norms, rings, SIZES, STAGES, ROWS, W, POLLS, PDL,
            )),
            (_fetch, (weights, rings, SIZES, LAST, STAGES)),
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
    """int32: what programs tell each other, see `_compute`."""
    flags: Tensor
    """[PROGRAMS] int32: turns of its barriers."""


def prepare(weights: LayerWeights) -> Prepared:
    """Descriptors of a layer's weights and memory for its barriers, as `packed_layer` takes them."""
    device = weights.o.words.device
    size = (9 * HIDDEN + 4 * weights.down.num_inputs) * MAX_ROWS // 8
    maps = tuple(found for one in weights.linears for found in _descriptors(one))
    memory = torch.empty(size, dtype=torch.int32, device=device)
    return Prepared(weights, maps, memory, torch.zeros(PROGRAMS, dtype=torch.int32, device=device))


def packed_layer(
    out: Tensor, attended: Tensor, residual: Tensor, layer: Prepared, *,
    num_warps: int = NUM_WARPS, stages: int | None = None, polls: int = POLLS,
) -> None:  # fmt: skip
    """attended [T, MIXED] and residual [T, HIDDEN], bfloat16 with rows side by side, T up to MAX_ROWS, -> out [T, QKV];
    the residual's sum in its place."""
    num_rows = len(attended)
    rows = launch.power_of_two(num_rows)
    weights = layer.weights
    launch.on(_packed_layer, (PROGRAMS,))(
        out, attended.view(torch.int32), residual, num_rows, layer.flags, layer.memory, weights.norm1, weights.norm2,
        *weights.eps, *layer.maps,
        HIDDEN=HIDDEN, INNER=weights.down.num_inputs, MIXED=weights.o.num_inputs, QKV=weights.qkv.num_outputs,
        STAGES=stages or STAGES[rows], ROWS=rows, W=num_warps,
        POLLS=polls, PDL=launch.dependent(), **launch.options(num_warps),
    )  # fmt: skip
