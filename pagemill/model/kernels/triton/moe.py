"""Experts on GPUs: the kernels by number of slots. Knows shapes, not layers.

Nothing is read back by the host, and grids depend on shapes alone: everything can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

from pagemill.model.kernels.moe import SILU, ExpertForm
from pagemill.model.kernels.triton import moe_one_sum
from pagemill.model.kernels.triton.moe_choices import (
    FEW_DOWN,
    FEW_GATE_UP,
    MAX_FEW_SLOTS,
    GroupedChoice,
    grouped_choices,
    one_by_one,
    one_sum_choices,
)
from pagemill.model.kernels.triton.moe_few import few_down, few_gate_up
from pagemill.model.kernels.triton.moe_grouped import combine, grouped_down, grouped_gate_up
from pagemill.model.kernels.triton.moe_route import route
from pagemill.model.kernels.triton.moe_sort import sort_slots

__all__ = ["experts", "few", "few_one_sum", "grouped", "route"]

Scales = tuple[Tensor, Tensor] | None


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    form: ExpertForm = SILU,
    scales: Scales = None,
    invariant: bool = False,
) -> Tensor:
    """As kernels.moe.experts: [T, E] -> [T, E].

    The products of `grouped` are one sum over the inputs each, in ascending order, so all of its tiles give the same
    bits (docs/deterministic.md), and so does `few_one_sum`; `few` adds up in lanes, and gives others: it is slower, but
    takes all types.
    """
    if not len(x):
        return torch.empty_like(x)
    x = _rows(x)
    chosen = chosen.contiguous()
    weights = weights.contiguous()
    num_slots = chosen.numel()
    if scales is None and moe_one_sum.takes(x, gate_up, down, chosen.shape[1]):
        if one_by_one(len(chosen), num_slots, len(gate_up)):
            return few_one_sum(x, gate_up, down, chosen, weights, first, form)
    elif num_slots <= MAX_FEW_SLOTS and not invariant:
        return few(x, gate_up, down, chosen, weights, first, form, scales)
    choices = grouped_choices(num_slots, len(gate_up), x.element_size())
    return grouped(x, gate_up, down, (chosen, weights), first, form, choices, scales)


def few(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    form: ExpertForm = SILU,
    scales: Scales = None,
) -> Tensor:
    """Slot by slot."""
    gate_up_scales, down_scales = scales or (None, None)
    inner = few_gate_up(x, gate_up, chosen, first, form, FEW_GATE_UP, gate_up_scales)
    return few_down(inner, down, chosen, weights, first, FEW_DOWN, down_scales, form)


def few_one_sum(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    form: ExpertForm = SILU,
) -> Tensor:
    """Slot by slot, with the bits of `grouped`."""
    choices = one_sum_choices(len(chosen))
    inner = moe_one_sum.gate_up_one_sum(x, gate_up, chosen, first, form, choices[0])
    return moe_one_sum.down_one_sum(inner, down, chosen, weights, first, choices[1], form)


def grouped(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routed: tuple[Tensor, Tensor],
    first: int,
    form: ExpertForm,
    choices: tuple[GroupedChoice, GroupedChoice],
    scales: Scales = None,
) -> Tensor:
    """Expert by expert. `routed`: chosen experts and their weights."""
    chosen, weights = routed
    gate_up_scales, down_scales = scales or (None, None)
    order = sort_slots(chosen, first, len(gate_up), choices[0].block_m)
    inner = grouped_gate_up(x, gate_up, order, chosen.shape[1], form, choices[0], gate_up_scales)
    parts = grouped_down(inner, down, order, choices[1], down_scales, form)
    return combine(parts, chosen, weights, first, len(gate_up))


def _rows(x: Tensor) -> Tensor:
    """Rows in one piece each, on which the kernels rely."""
    return x if x.stride(-1) == 1 else x.contiguous()
