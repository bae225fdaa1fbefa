"""What a mixture of experts computes: `route` and `experts`, by Triton on GPUs, routers natively on CPUs, else in
plain torch.

Arguments are not checked. Letters in shapes: T tokens, K experts of a token, X experts of the model, N experts here,
E hidden size, I inner size.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pagemill.model.kernels.dispatch import triton_kernels
from pagemill.model.kernels.native import library
from pagemill.model.kernels.native_experts import NativeRouting
from pagemill.model.kernels.reference import gated
from pagemill.model.kernels.routing import Routing


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What an expert does between its two products, and adds to them."""

    gelu: bool = False
    """act(gate) * up: GELU in its tanh form, else SiLU."""
    clamp: tuple[float, float] | None = None
    """(alpha, limit) -> (up + 1) * gate * sigmoid(alpha * gate) instead, of a gate of at most `limit`, and an up within
    it either way (gpt-oss)."""
    gate_up_bias: Tensor | None = None
    """[N, 2 * I]"""
    down_bias: Tensor | None = None
    """[N, E]"""

    def gated(self, x: Tensor) -> Tensor:
        """[T, 2 * I], gates first -> [T, I]."""
        if self.clamp is None:
            return gated(x, self.gelu)
        alpha, limit = self.clamp
        gate, up = x.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * (gate * alpha).sigmoid()


FACTOR_INPUTS: Final = 128
"""Inputs that share a factor, where not all of an output do."""
SILU: Final = ExpertForm()
GELU: Final = ExpertForm(gelu=True)


def form_of(gate: str) -> ExpertForm:
    """Of a gated activation: silu or gelu_tanh."""
    return GELU if gate == "gelu_tanh" else SILU


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[T, X] float32 -> (experts [T, K] int32, weights [T, K] float32). `bias` [X] is added to the scores for choosing,
    not for weighing."""
    if logits.is_cpu and not torch.compiler.is_compiling() and library() is not None:
        return NativeRouting.of(routing, logits.shape[1], bias).choose(logits)
    kernels = triton_kernels("moe") if logits.is_cuda else None
    if kernels is None:
        return reference_route(logits, routing, bias)
    result: tuple[Tensor, Tensor] = kernels.route(logits, routing, bias)
    return result


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    form: ExpertForm = SILU,
    scales: tuple[Tensor, Tensor] | None = None,
    invariant: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts: [T, E] -> [T, E].

    gate_up [N, 2 * I, E] and down [N, E, I] are those of experts first .. first + N; what others would add is left out.
    Weights of 8-bit floats come with their factors, float32: per output, [N, 2 * I] and [N, E], or also for each
    `FACTOR_INPUTS` inputs, [N, G, 2 * I] and [N, G, E]. `invariant`: a token has
    the same bits whatever is computed beside it.
    """
    kernels = triton_kernels("moe") if x.is_cuda else None
    if kernels is None:
        return reference_experts(x, gate_up, down, chosen, weights, first, form, scales)
    result: Tensor = kernels.experts(x, gate_up, down, chosen, weights, first, form, scales, invariant)
    return result


def reference_route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`route` in plain torch."""
    wide = logits.float()
    scores = wide.sigmoid() if routing.sigmoid else wide.softmax(-1)
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), -torch.inf)
    chosen = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen.to(torch.int32), weights * routing.scale


def _in_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """[T, X] bool."""
    num_tokens, num_experts = choice.shape
    grouped = choice.view(num_tokens, routing.num_groups, -1)
    quality = grouped.topk(2, dim=-1).values.sum(-1) if routing.group_by_two else grouped.amax(-1)
    best = quality.topk(routing.top_groups, dim=-1).indices
    picked = torch.zeros_like(quality, dtype=torch.bool).scatter_(1, best, True)
    return picked.repeat_interleave(num_experts // routing.num_groups, dim=1)


def reference_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    form: ExpertForm = SILU,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`experts` in plain torch; inner products in float32, intermediate results in x's type."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        tokens, places = (chosen == first + expert).nonzero(as_tuple=True)
        up, back = gate_up[expert].float(), down[expert].float()
        if scales is not None:
            up, back = up * spread(scales[0][expert], up), back * spread(scales[1][expert], back)
        given = x[tokens].float() @ up.T
        if form.gate_up_bias is not None:
            given += form.gate_up_bias[expert].float()
        part = form.gated(given).to(x.dtype).float() @ back.T
        if form.down_bias is not None:
            part += form.down_bias[expert].float()
        out.index_add_(0, tokens, part * weights[tokens, places].unsqueeze(1))
    return out.to(x.dtype)


def spread(factors: Tensor, weight: Tensor) -> Tensor:
    """[O] -> [O, 1], or [G, O] -> [O, K]."""
    if factors.dim() == 1:
        return factors.unsqueeze(1)
    return factors.repeat_interleave(FACTOR_INPUTS, 0)[: weight.shape[1]].T
