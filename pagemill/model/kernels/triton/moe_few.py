"""Experts for few tokens: each slot (a token and one of its experts) reads its expert's weights at memory bandwidth.

No sorting: what two slots of one expert read twice comes from the cache. Sums are formed in one order, in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.moe import FACTOR_INPUTS, SILU, ExpertForm
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gated import gate_options, gate_times
from pagemill.model.kernels.triton.moe_choices import FewChoice


@triton.jit
def _grouped(
    products, factors, start, rows, real, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """[N, K] of inputs from `start`, times a factor for each GROUP of them. `factors` [groups, OUTPUTS]."""
    GROUPS: tl.constexpr = (products.shape[1] + GROUP - 1) // GROUP
    groups = start // GROUP + tl.arange(0, GROUPS)
    known = real[:, None] & (groups * GROUP < SIZE)[None, :]
    factor = tl.load(factors + groups[None, :] * OUTPUTS + rows[:, None], known, 0.0)
    together = tl.reshape(products, [products.shape[0], GROUPS, products.shape[1] // GROUPS])
    return tl.reshape(together * factor[:, :, None], products.shape)


@triton.jit
def _gate_up(
    out, x, weight, scales, bias, chosen, first, stride_x,
    N: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SCALED: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen + slot).to(tl.int64) - first
    if (expert >= 0) & (expert < N):
        rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        lanes = tl.arange(0, BLOCK_K)
        real = rows < INNER
        base = weight + expert * (2 * INNER * E)
        row = x + (slot // K) * stride_x
        gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, E, BLOCK_K):
            columns = start + lanes
            mask = real[:, None] & (columns < E)[None, :]
            places = base + rows[:, None] * E + columns[None, :]
            value = tl.load(row + columns, mask=columns < E, other=0.0).to(tl.float32)[None, :]
            gate_part = tl.load(places, mask=mask, other=0.0).to(tl.float32) * value
            up_part = tl.load(places + INNER * E, mask=mask, other=0.0).to(tl.float32) * value
            if GROUP:
                factors = scales + expert * ((E + GROUP - 1) // GROUP * (2 * INNER))
                gate_part = _grouped(gate_part, factors, start, rows, real, 2 * INNER, E, GROUP)
                up_part = _grouped(up_part, factors + INNER, start, rows, real, 2 * INNER, E, GROUP)
            gates += gate_part
            ups += up_part
        gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
        if SCALED:
            factors = scales + expert * (2 * INNER) + rows
            gate *= tl.load(factors, mask=real, other=0.0)
            up *= tl.load(factors + INNER, mask=real, other=0.0)
        if BIASED:
            biases = bias + expert * (2 * INNER) + rows
            gate += tl.load(biases, mask=real, other=0.0).to(tl.float32)
            up += tl.load(biases + INNER, mask=real, other=0.0).to(tl.float32)
        result = gate_times(gate, up, GELU, CLAMPED, ALPHA, LIMIT)
        tl.store(out + slot * INNER + rows, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _down(
    out, inner, weight, scales, bias, chosen, weights, first,
    N: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    real = rows < E
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(K):
        slot = token * K + place
        expert = tl.load(chosen + slot).to(tl.int64) - first
        here = (expert >= 0) & (expert < N)
        expert = tl.where(here, expert, 0)
        base = weight + expert * (E * INNER)
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, INNER, BLOCK_K):
            columns = start + lanes
            live = (columns < INNER) & here
            value = tl.load(inner + slot * INNER + columns, mask=live, other=0.0).to(tl.float32)
            places = base + rows[:, None] * INNER + columns[None, :]
            tile = tl.load(places, mask=real[:, None] & live[None, :], other=0.0)
            product = tile.to(tl.float32) * value[None, :]
            if GROUP:
                factors = scales + expert * ((INNER + GROUP - 1) // GROUP * E)
                product = _grouped(product, factors, start, rows, real, E, INNER, GROUP)
            sums += product
        factor = tl.load(weights + slot)
        part = tl.sum(sums, 1)
        if SCALED:
            part *= tl.load(scales + expert * E + rows, mask=real, other=0.0)
        if BIASED:
            part += tl.load(bias + expert * E + rows, mask=real, other=0.0).to(tl.float32)
        total += tl.where(here, part * factor, 0.0)
    tl.store(out + token * E + rows, total.to(out.dtype.element_ty), mask=real)


def factor_inputs(scales: Tensor | None) -> int:
    """Inputs that share a factor; 0: all of an output, or none has one."""
    return FACTOR_INPUTS if scales is not None and scales.dim() == 3 else 0


def few_gate_up(
    x: Tensor,
    weight: Tensor,
    chosen: Tensor,
    first: int,
    form: ExpertForm,
    choice: FewChoice,
    scales: Tensor | None = None,
) -> Tensor:
    """[T, E] times each slot's [2 * I, E] -> activated [T * K, I]; rows of slots elsewhere are not written."""
    num_experts, double, size = weight.shape
    inner_size = double // 2
    num_slots = chosen.numel()
    top_k = chosen.shape[1]
    out = torch.empty(num_slots, inner_size, dtype=x.dtype, device=x.device)
    launch.on(_gate_up, (num_slots, triton.cdiv(inner_size, choice.block_n)))(
        out, x, weight, x if scales is None else scales, x if form.gate_up_bias is None else form.gate_up_bias, chosen,
        first, x.stride(0),
        N=num_experts, INNER=inner_size, E=size, K=top_k, BLOCK_N=choice.block_n,
        BLOCK_K=min(choice.block_k, triton.next_power_of_2(size)), SCALED=scales is not None and scales.dim() == 2,
        GROUP=factor_inputs(scales), BIASED=form.gate_up_bias is not None, PDL=launch.dependent(), **gate_options(form),
        **launch.options(choice.num_warps),
    )  # fmt: skip
    return out


def few_down(
    inner: Tensor,
    weight: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    choice: FewChoice,
    scales: Tensor | None = None,
    form: ExpertForm = SILU,
) -> Tensor:
    """[T * K, I] times each slot's [E, I], weighted and added up for each token -> [T, E]."""
    num_experts, size, inner_size = weight.shape
    num_tokens, top_k = chosen.shape
    out = torch.empty(num_tokens, size, dtype=inner.dtype, device=inner.device)
    launch.on(_down, (num_tokens, triton.cdiv(size, choice.block_n)))(
        out, inner, weight, inner if scales is None else scales, inner if form.down_bias is None else form.down_bias,
        chosen, weights, first,
        N=num_experts, INNER=inner_size, E=size, K=top_k, BLOCK_N=choice.block_n,
        BLOCK_K=min(choice.block_k, triton.next_power_of_2(inner_size)),
        SCALED=scales is not None and scales.dim() == 2, GROUP=factor_inputs(scales), BIASED=form.down_bias is not None,
        PDL=launch.dependent(), **launch.options(choice.num_warps),
    )  # fmt: skip
    return out
