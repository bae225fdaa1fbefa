"""Experts for many tokens: matrix products over tiles of slots of one expert, read through their sorted order.

A slot is a token and one of its experts. Each weight is read once for all slots of its tile; tiles that a step does
not need return at once, so that one grid does for all steps of a shape.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.moe import SILU, ExpertForm
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gated import gate_options, gate_times
from pagemill.model.kernels.triton.moe_choices import GroupedChoice
from pagemill.model.kernels.triton.moe_few import factor_inputs
from pagemill.model.kernels.triton.moe_sort import SortedSlots

_COMBINE_REGISTERS = 64
"""Of a thread. Told nothing, the assembler makes do with 32, for which it loads two parts at a time."""


@triton.jit
def _product(rows, tile, acc, factors, outputs, real, GROUP: tl.constexpr, SWAP: tl.constexpr):
    """acc + rows [M, K] x tile [N, K]^T; with SWAP acc is [N, M]. With a GROUP, the weights are rounded after they are
    multiplied with the factors, as if they had been dequantized."""
    if GROUP:
        tile = tile.to(tl.float32) * tl.load(factors + outputs, real, 0.0)[:, None]
    tile = tile.to(rows.dtype)
    # One return: the compiler wants those of a function to agree in shape, also those that are not reached.
    if SWAP:
        acc = tl.dot(tile, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(tile), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["max_tiles"])
def _gate_up(
    out, x, weight, scales, bias, slots, tiles, max_tiles, num_columns, stride_x,
    INNER: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SCALED: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, column = tl.program_id(0) // num_columns, tl.program_id(0) % num_columns
    num_rows = tl.load(tiles + 2 * max_tiles + tile)
    EVEN: tl.constexpr = (E % BLOCK_K == 0) and (INNER % BLOCK_N == 0)
    HIGH: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    WIDE: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    if num_rows > 0:
        expert = tl.load(tiles + tile).to(tl.int64)
        begin = tl.load(tiles + max_tiles + tile)
        members, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        # Rows beyond the tile repeat some token; what they give is not stored.
        slot = tl.load(slots + begin + members, mask=members < num_rows, other=0)
        outputs = column * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = x + (slot // K).to(tl.int64)[:, None] * stride_x + lanes[None, :]
        places = weight + expert * (2 * INNER * E) + outputs[:, None] * E + lanes[None, :]
        gate = tl.zeros([HIGH, WIDE], tl.float32)
        up = tl.zeros([HIGH, WIDE], tl.float32)
        for start in tl.range(0, E, BLOCK_K):
            if EVEN:
                values = tl.load(rows + start)
                gates = tl.load(places + start)
                ups = tl.load(places + INNER * E + start)
            else:
                live = (start + lanes < E)[None, :]
                real = (outputs < INNER)[:, None] & live
                values = tl.load(rows + start, mask=live, other=0.0)
                gates = tl.load(places + start, mask=real, other=0.0)
                ups = tl.load(places + INNER * E + start, mask=real, other=0.0)
            factors_here = scales
            if GROUP:
                factors_here = scales + (expert * ((E + GROUP - 1) // GROUP) + start // GROUP) * (2 * INNER)
            gate = _product(values, gates, gate, factors_here, outputs, outputs < INNER, GROUP, SWAP)
            up = _product(values, ups, up, factors_here + INNER, outputs, outputs < INNER, GROUP, SWAP)
        if SWAP:
            gate, up = tl.trans(gate), tl.trans(up)
        if SCALED:
            factors = scales + expert * (2 * INNER) + outputs
            gate *= tl.load(factors, mask=outputs < INNER, other=0.0)[None, :]
            up *= tl.load(factors + INNER, mask=outputs < INNER, other=0.0)[None, :]
        if BIASED:
            biases = bias + expert * (2 * INNER) + outputs
            gate += tl.load(biases, mask=outputs < INNER, other=0.0).to(tl.float32)[None, :]
            up += tl.load(biases + INNER, mask=outputs < INNER, other=0.0).to(tl.float32)[None, :]
        result = gate_times(gate, up, GELU, CLAMPED, ALPHA, LIMIT).to(out.dtype.element_ty)
        targets = out + (begin + members).to(tl.int64)[:, None] * INNER + outputs[None, :]
        tl.store(targets, result, mask=(members < num_rows)[:, None] & (outputs < INNER)[None, :])


@triton.jit(do_not_specialize=["max_tiles"])
def _down(
    out, inner, weight, scales, bias, slots, tiles, max_tiles, num_columns,
    INNER: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, column = tl.program_id(0) // num_columns, tl.program_id(0) % num_columns
    num_rows = tl.load(tiles + 2 * max_tiles + tile)
    EVEN: tl.constexpr = (INNER % BLOCK_K == 0) and (E % BLOCK_N == 0)
    HIGH: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    WIDE: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    if num_rows > 0:
        expert = tl.load(tiles + tile).to(tl.int64)
        begin = tl.load(tiles + max_tiles + tile)
        members, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        outputs = column * BLOCK_N + tl.arange(0, BLOCK_N)
        here = members < num_rows
        row = begin + tl.where(here, members, 0)
        rows = inner + row.to(tl.int64)[:, None] * INNER + lanes[None, :]
        places = weight + expert * (E * INNER) + outputs[:, None] * INNER + lanes[None, :]
        acc = tl.zeros([HIGH, WIDE], tl.float32)
        for start in tl.range(0, INNER, BLOCK_K):
            if EVEN:
                values = tl.load(rows + start)
                weights = tl.load(places + start)
            else:
                live = (start + lanes < INNER)[None, :]
                values = tl.load(rows + start, mask=live, other=0.0)
                weights = tl.load(places + start, mask=(outputs < E)[:, None] & live, other=0.0)
            factors_here = scales
            if GROUP:
                factors_here = scales + (expert * ((INNER + GROUP - 1) // GROUP) + start // GROUP) * E
            acc = _product(values, weights, acc, factors_here, outputs, outputs < E, GROUP, SWAP)
        if SWAP:
            acc = tl.trans(acc)
        if SCALED:
            acc *= tl.load(scales + expert * E + outputs, mask=outputs < E, other=0.0)[None, :]
        if BIASED:
            acc += tl.load(bias + expert * E + outputs, mask=outputs < E, other=0.0).to(tl.float32)[None, :]
        slot = tl.load(slots + begin + members, mask=here, other=0).to(tl.int64)
        targets = out + slot[:, None] * E + outputs[None, :]
        tl.store(targets, acc.to(out.dtype.element_ty), mask=here[:, None] & (outputs < E)[None, :])


@triton.jit
def _combine(
    out, parts, chosen, weights, first, N: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The weighted sum of a token's slots, those elsewhere left out."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # All loads of one kind before the next, so that parts do not wait for one another.
    experts, factors, loaded = (), (), ()
    for place in tl.static_range(K):
        experts += (tl.load(chosen + token * K + place) - first,)  # type: ignore[assignment]
        factors += (tl.load(weights + token * K + place),)  # type: ignore[assignment]
    for place in tl.static_range(K):
        mask = (columns < E) & (experts[place] >= 0) & (experts[place] < N)
        loaded += (tl.load(parts + (token * K + place) * E + columns, mask, 0.0),)  # type: ignore[assignment]
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(K):
        # As in moe_one_sum.py: nothing is left to the compiler.
        total = tl.fma(loaded[place].to(tl.float32), tl.broadcast_to(factors[place], [BLOCK]), total)
    tl.store(out + token * E + columns, total.to(out.dtype.element_ty), mask=columns < E)


def grouped_gate_up(
    x: Tensor,
    weight: Tensor,
    order: SortedSlots,
    top_k: int,
    form: ExpertForm,
    choice: GroupedChoice,
    scales: Tensor | None = None,
) -> Tensor:
    """[T, E] times [N, 2 * I, E] -> activated [S, I], in the order of the sorted slots."""
    _, double, size = weight.shape
    inner_size = double // 2
    out = torch.empty(len(order.slots), inner_size, dtype=x.dtype, device=x.device)
    num_columns = triton.cdiv(inner_size, choice.block_n)
    launch.on(_gate_up, (order.max_tiles * num_columns,))(
        out, x, weight, x if scales is None else scales, x if form.gate_up_bias is None else form.gate_up_bias,
        order.slots, order.tiles, order.max_tiles, num_columns, x.stride(0), INNER=inner_size, E=size,
        K=top_k, BLOCK_M=order.tile_rows, BLOCK_N=choice.block_n,
        BLOCK_K=choice.block_k, SCALED=scales is not None and scales.dim() == 2,
        GROUP=factor_inputs(scales), BIASED=form.gate_up_bias is not None, SWAP=choice.swap,
        PDL=launch.dependent(), **gate_options(form),
        num_stages=choice.num_stages, **launch.options(choice.num_warps),
    )  # fmt: skip
    return out


def grouped_down(
    inner: Tensor,
    weight: Tensor,
    order: SortedSlots,
    choice: GroupedChoice,
    scales: Tensor | None = None,
    form: ExpertForm = SILU,
) -> Tensor:
    """[S, I] in sorted order times [N, E, I] -> [S, E] by slot; slots elsewhere are not written."""
    _, size, inner_size = weight.shape
    out = torch.empty(len(order.slots), size, dtype=inner.dtype, device=inner.device)
    num_columns = triton.cdiv(size, choice.block_n)
    launch.on(_down, (order.max_tiles * num_columns,))(
        out, inner, weight, inner if scales is None else scales, inner if form.down_bias is None else form.down_bias,
        order.slots, order.tiles, order.max_tiles, num_columns, INNER=inner_size, E=size,
        BLOCK_M=order.tile_rows, BLOCK_N=choice.block_n, BLOCK_K=choice.block_k,
        SCALED=scales is not None and scales.dim() == 2, GROUP=factor_inputs(scales),
        BIASED=form.down_bias is not None, SWAP=choice.swap, PDL=launch.dependent(),
        num_stages=choice.num_stages,
        **launch.options(choice.num_warps),
    )  # fmt: skip
    return out


def combine(parts: Tensor, chosen: Tensor, weights: Tensor, first: int, num_experts: int) -> Tensor:
    """[S, E] by slot -> [T, E]: the weighted sums."""
    (num_tokens, top_k), size = chosen.shape, parts.shape[1]
    out = torch.empty(num_tokens, size, dtype=parts.dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(size))
    launch.on(_combine, (num_tokens, triton.cdiv(size, block)))(
        out, parts, chosen, weights, first, N=num_experts, E=size, K=top_k, BLOCK=block, PDL=launch.dependent(),
        maxnreg=_COMBINE_REGISTERS, **launch.options(),
    )  # fmt: skip
    return out
