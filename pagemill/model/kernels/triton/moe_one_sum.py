"""Experts for few tokens whose bits are those of `moe_grouped`: every output is one sum over the inputs, in ascending
order, in float32, and everything is rounded where the grouped kernels round it (docs/deterministic.md).

No sorting: a program of the first layer has one slot (a token and one of its experts), and a program of the second all
slots of a token, whose parts it adds up itself. Tiles of the weights are the left operands of the tensor cores, which
have 16 outputs to a warp; the right ones are one row, or a token's rows, and what fills them up is not kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.moe import ExpertForm
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gated import gate_options, gate_times
from pagemill.model.kernels.triton.moe_choices import OneSumChoice

_ROWS = 8
"""Of the right operand: what the tensor cores' instruction takes at least."""
_MAX_TOP_K = 16


@triton.jit
def _gate_up_one_sum(
    out, x, weight, bias, chosen, first, stride_x,
    N: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (slot, block of outputs). The right operand is the slot's token and zeros."""
    slot = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(chosen + slot).to(tl.int64) - first
    if (expert >= 0) & (expert < N):
        EVEN: tl.constexpr = (E % BLOCK_K == 0) and (INNER % BLOCK_N == 0)
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        members, lanes = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
        real, only = outputs < INNER, members == 0
        row = x + slot // K * stride_x + (members * 0)[:, None] + lanes[None, :]
        places = weight + expert * (2 * INNER * E) + outputs[:, None] * E + lanes[None, :]
        gates = tl.zeros([BLOCK_N, ROWS], tl.float32)
        ups = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for start in tl.range(0, E, BLOCK_K, num_stages=STAGES):
            live = (lanes >= 0)[None, :] if EVEN else (start + lanes < E)[None, :]
            values = tl.load(row + start, only[:, None] & live, 0.0)
            if EVEN:
                gate_tile = tl.load(places + start)
                up_tile = tl.load(places + INNER * E + start)
            else:
                gate_tile = tl.load(places + start, real[:, None] & live, 0.0)
                up_tile = tl.load(places + INNER * E + start, real[:, None] & live, 0.0)
            gates = tl.dot(gate_tile, values.T, gates)
            ups = tl.dot(up_tile, values.T, ups)
        gate = tl.sum(tl.where(only[None, :], gates, 0.0), 1)
        up = tl.sum(tl.where(only[None, :], ups, 0.0), 1)
        if BIASED:
            biases = bias + expert * (2 * INNER) + outputs
            gate += tl.load(biases, mask=real, other=0.0).to(tl.float32)
            up += tl.load(biases + INNER, mask=real, other=0.0).to(tl.float32)
        result = gate_times(gate, up, GELU, CLAMPED, ALPHA, LIMIT)
        tl.store(out + slot * INNER + outputs, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _down_one_sum(
    out, inner, weight, bias, chosen, weights, first,
    N: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, block of outputs). The right operand is all slots of the token: each of its experts is multiplied
    by all, and what it makes of its own is kept."""
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    members, lanes = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    real = outputs < E
    within = outputs[:, None] * INNER + lanes[None, :]
    rows = inner + (token * K + members)[:, None] * INNER + lanes[None, :]
    experts, here, factors, places, sums = (), (), (), (), ()
    for member in tl.static_range(K):
        expert = tl.load(chosen + token * K + member).to(tl.int64) - first
        held = (expert >= 0) & (expert < N)
        experts += (tl.where(held, expert, 0),)  # type: ignore[assignment]
        here += (held,)  # type: ignore[assignment]
        factors += (tl.load(weights + token * K + member),)  # type: ignore[assignment]
        places += (weight + experts[member] * (E * INNER) + within,)  # type: ignore[assignment]
        sums += (tl.zeros([BLOCK_N, ROWS], tl.float32),)  # type: ignore[assignment]
    EVEN: tl.constexpr = (INNER % BLOCK_K == 0) and (E % BLOCK_N == 0)
    for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        live = (lanes >= 0)[None, :] if EVEN else (start + lanes < INNER)[None, :]
        values = tl.load(rows + start, (members < K)[:, None] & live, 0.0)
        tiles, added = (), ()
        for member in tl.static_range(K):
            mask = here[member] if EVEN else real[:, None] & live & here[member]
            tiles += (tl.load(places[member] + start, mask, 0.0),)  # type: ignore[assignment]
        for member in tl.static_range(K):
            added += (tl.dot(tiles[member], values.T, sums[member]),)  # type: ignore[assignment]
        sums = added
    total = tl.zeros([BLOCK_N], tl.float32)
    for member in tl.static_range(K):
        part = tl.sum(tl.where((members == member)[None, :], sums[member], 0.0), 1)
        if BIASED:
            part += tl.load(bias + experts[member] * E + outputs, mask=real, other=0.0).to(tl.float32)
        # Rounded as what the grouped kernel leaves, and added up as `combine` does.
        part = tl.where(here[member], part, 0.0).to(out.dtype.element_ty).to(tl.float32)
        total = tl.fma(part, tl.broadcast_to(factors[member], [BLOCK_N]), total)
    tl.store(out + token * E + outputs, total.to(out.dtype.element_ty), mask=real)


def takes(x: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> bool:
    """Whether these kernels multiply them: two-byte floats, all of one type."""
    return top_k <= _MAX_TOP_K and x.dtype == gate_up.dtype == down.dtype and x.element_size() == 2


def gate_up_one_sum(
    x: Tensor, weight: Tensor, chosen: Tensor, first: int, form: ExpertForm, choice: OneSumChoice
) -> Tensor:
    """[T, E] times each slot's [2 * I, E] -> activated [T * K, I]; rows of slots elsewhere are not written."""
    num_experts, double, size = weight.shape
    inner_size = double // 2
    num_slots = chosen.numel()
    out = torch.empty(num_slots, inner_size, dtype=x.dtype, device=x.device)
    launch.on(_gate_up_one_sum, (num_slots, triton.cdiv(inner_size, choice.block_n)))(
        out, x, weight, x if form.gate_up_bias is None else form.gate_up_bias, chosen, first, x.stride(0),
        N=num_experts, INNER=inner_size, E=size, K=chosen.shape[1], ROWS=_ROWS, BLOCK_N=choice.block_n,
        BLOCK_K=choice.block_k, STAGES=choice.num_stages, BIASED=form.gate_up_bias is not None, PDL=launch.dependent(),
        **gate_options(form), **launch.options(choice.num_warps),
    )  # fmt: skip
    return out


def down_one_sum(
    inner: Tensor,
    weight: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    choice: OneSumChoice,
    form: ExpertForm,
) -> Tensor:
    """[T * K, I] times each slot's [E, I], rounded, weighted and added up for each token -> [T, E]."""
    num_experts, size, inner_size = weight.shape
    num_tokens, top_k = chosen.shape
    out = torch.empty(num_tokens, size, dtype=inner.dtype, device=inner.device)
    launch.on(_down_one_sum, (num_tokens, triton.cdiv(size, choice.block_n)))(
        out, inner, weight, inner if form.down_bias is None else form.down_bias, chosen, weights, first,
        N=num_experts, INNER=inner_size, E=size, K=top_k, ROWS=max(_ROWS, launch.power_of_two(top_k)),
        BLOCK_N=choice.block_n, BLOCK_K=choice.block_k, STAGES=choice.num_stages, BIASED=form.down_bias is not None,
        PDL=launch.dependent(), **launch.options(choice.num_warps),
    )  # fmt: skip
    return out
