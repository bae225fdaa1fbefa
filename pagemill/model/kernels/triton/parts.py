"""A product whose inputs are split over several programs: what each leaves, and the sum in a fixed order, so that a run
gives the bits of the one before; by the last program of an output to arrive, or by a second kernel. Knows no product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.arrival import arrives_last
from pagemill.model.kernels.triton.gated import activate

MAX_COUNTERS = 8192
_COMBINED = 1024
LAST_SUMS_ROWS = 16
"""Up to here the last program of an output sums its parts."""
_counters: dict[torch.device, Tensor] = {}


@triton.jit
def finish(out, sums, up_sums, bias, tokens, rows, M, N, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
            GELU: tl.constexpr):  # fmt: skip
    """Bias and activation of [tokens, rows], and the store."""
    if HAS_BIAS:
        sums += tl.load(bias + rows, rows < N, 0.0).to(tl.float32)[None, :]
        if GATED:
            up_sums += tl.load(bias + N + rows, rows < N, 0.0).to(tl.float32)[None, :]
    if GATED:
        sums = activate(sums, GELU) * up_sums
    mask = (tokens < M)[:, None] & (rows < N)[None, :]
    tl.store(out + tokens[:, None] * N + rows[None, :], sums.to(out.dtype.element_ty), mask)


@triton.jit
def leave(part, sums, up_sums, tokens, rows, M, N, stacked, GATED: tl.constexpr):
    """What one part of the inputs gives."""
    mask = (tokens < M)[:, None] & (rows < N)[None, :]
    places = part + tokens[:, None] * stacked + rows[None, :]
    tl.store(places, sums, mask)
    if GATED:
        tl.store(places + N, up_sums, mask)


@triton.jit
def sum_parts(places, part_stride, mask, SPLIT: tl.constexpr):
    """In order. From the L2 cache: other programs wrote them while this one ran."""
    sums = tl.load(places, mask, 0.0, cache_modifier=".cg")
    for part in tl.static_range(1, SPLIT):
        sums += tl.load(places + part * part_stride, mask, 0.0, cache_modifier=".cg")
    return sums


@triton.jit
def all_parts(parts, tokens, rows, M, N, stacked, part_stride, SPLIT: tl.constexpr, GATED: tl.constexpr):
    """The sums of what the programs of an output have left."""
    mask = (tokens < M)[:, None] & (rows < N)[None, :]
    places = parts + tokens[:, None] * stacked + rows[None, :]
    sums = sum_parts(places, part_stride, mask, SPLIT)
    up_sums = sums
    if GATED:
        up_sums = sum_parts(places + N, part_stride, mask, SPLIT)
    return sums, up_sums


@triton.jit
def end(
    out, parts, counters, result, up, bias, tokens, rows, block, part, M, N, stacked, part_stride,
    SPLIT: tl.constexpr, LAST_SUMS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """What a program does with its sums [M, N]."""
    if SPLIT > 1:
        leave(parts + part * part_stride, result, up, tokens, rows, M, N, stacked, GATED)
    last = SPLIT == 1
    if LAST_SUMS:
        last = arrives_last(counters + block, SPLIT - 1)
    if last:
        if LAST_SUMS:
            tl.store(counters + block, 0)
            result, up = all_parts(parts, tokens, rows, M, N, stacked, part_stride, SPLIT, GATED)
        finish(out, result, up, bias, tokens, rows, M, N, HAS_BIAS, GATED, GELU)


@triton.jit(do_not_specialize=["M"])
def _combine(
    out, parts, bias, M, N, stacked, part_stride,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, block of outputs)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) + tl.arange(0, 1)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums, up_sums = all_parts(parts, token, outputs, M, N, stacked, part_stride, SPLIT, GATED)
    finish(out, sums, up_sums, bias, token, outputs, M, N, HAS_BIAS, GATED, GELU)


def combine(out: Tensor, parts: Tensor, bias: Tensor | None, gate: str | None) -> None:
    """out [M, N] of parts [SPLIT, M, stacked] float32, summed in order, by a kernel of its own; with a gate, stacked is
    2 * N."""
    num_rows, num_outputs = out.shape
    split, _, stacked = parts.shape
    block = min(_COMBINED, launch.power_of_two(num_outputs))
    launch.on(_combine, (num_rows, triton.cdiv(num_outputs, block)))(
        out, parts, out if bias is None else bias, num_rows, num_outputs, stacked, parts.stride(0),
        SPLIT=split, BLOCK=block, HAS_BIAS=bias is not None, GATED=gate is not None, GELU=gate == "gelu_tanh",
        PDL=launch.dependent(), **launch.options(),
    )  # fmt: skip


def counters_of(device: torch.device) -> Tensor | None:
    """Of programs that have arrived, for each block of outputs, all zero; one kernel at a time uses them, also with
    dependent launch: each waits until the one before has ended. None where they would have to be made while a graph is
    captured, which would write the zeros at each replay only."""
    found = _counters.get(device)
    if found is None and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        found = _counters[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    return found
