"""`Experts`: the experts of one layer that this rank holds. Knows neither router nor exchange."""

import torch
from torch import Tensor, nn

from pagemill.errors import ModelError
from pagemill.model.distributed.split import even_split, padded_split
from pagemill.model.layers.activation import gate_of
from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.part import Part
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights

GATE, UP, DOWN = range(3)
"""A checkpoint's tensors of an expert, in the order of `WeightMap.experts`."""


class Experts(nn.Module):
    """Some whole experts, dealt out over the expert-parallel ranks, or a slice of each, over the tensor-parallel ranks.

    Either way `forward` gives this rank's share of the sum over a token's experts.
    """

    def __init__(self, size: int, inner_size: int, num_experts: int, activation: str, *, ctx: LayerContext) -> None:
        """Raises ConfigError when inner_size cannot be split, ModelError for an activation without a gated form."""
        super().__init__()
        self.name = ctx.name
        self._ctx, self._gate = ctx, gate_of(activation)
        self._shape = (inner_size, size)
        if ctx.expert_parallel:
            self.group = ctx.groups.ep
            self.held = padded_split(num_experts, self.group.rank, self.group.size)
            self._inner = range(inner_size)
        else:
            self.group = ctx.groups.tp
            self.held = range(num_experts)
            self._inner = even_split(inner_size, self.group.rank, self.group.size, "moe_intermediate_size")
        self.shards = range(3 * num_experts)
        """Tensors of all experts of the model, this rank's or not."""
        self.sizes = ExpertSizes(len(self.held), size, len(self._inner))
        self.weights: ExpertWeights | None = None
        self._waiting: dict[int, Tensor] = {}
        """Gates without their up, and the other way round, by shard."""

    def expected(self) -> tuple[str, ...]:
        """Kinds of tensors that every shard has."""
        return ("weight",)

    def part(self, kind: str, shard: int, shape: tuple[int, ...]) -> Part | None:
        """What this rank reads of a tensor; None of another rank's expert. Raises ModelError on a wrong shape or
        kind."""
        expert, which = divmod(shard, 3)
        expected = self._shape[::-1] if which == DOWN else self._shape
        if kind != "weight" or tuple(shape) != expected:
            raise ModelError(f"{self.name}.{expert}.{kind} has shape {tuple(shape)}, expected {expected}")
        if expert not in self.held:
            return None
        return Part(1 if which == DOWN else 0, self._inner.start, self._inner.stop)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take this rank's part of one tensor of one of its experts."""
        expert, which = divmod(shard, 3)
        tensor = tensor.to(self._ctx.dtype)
        if self.weights is None:
            self.weights = self._ctx.quant.experts(self.sizes, tensor.dtype, tensor.device, self._gate)
        if which == DOWN:
            self.weights.put_down(expert - self.held.start, tensor.contiguous())
            return
        self._waiting[shard] = tensor
        pair = (3 * expert + GATE, 3 * expert + UP)
        if all(part in self._waiting for part in pair):
            gate_up = torch.cat([self._waiting.pop(part) for part in pair])
            self.weights.put_gate_up(expert - self.held.start, gate_up)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, E], experts [T, K] int32, their weights [T, K] float32 -> [T, E]: this rank's share."""
        if self.weights is None:
            return torch.zeros_like(x)  # more ranks than experts: this one has none
        return self.weights.apply(x, chosen, weights, self.held.start)
