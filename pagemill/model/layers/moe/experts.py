"""`Experts`: the experts of one layer that this rank holds. Knows neither router nor exchange."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pagemill.errors import ModelError
from pagemill.model.distributed.split import even_split, padded_split
from pagemill.model.kernels.native_experts import NativeExperts
from pagemill.model.layers.activation import gate_of
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.weight_reader import WeightReader
from pagemill.model.loading.quantized_tensor import QuantizedTensor, stacked
from pagemill.model.loading.stored import LayerTensor, WeightPart
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights, Role

GATE, UP, DOWN = range(3)
"""A checkpoint's tensors of an expert, in the order of `WeightMap.experts`."""


class Experts(nn.Module):
    """Some whole experts, dealt out over the expert-parallel ranks, or a slice of each, over the tensor-parallel ranks.

    Either way `forward` gives this rank's share of the sum over a token's experts.
    """

    role = Role.LINEAR
    """What a weight of an expert is for."""

    def __init__(self, size: int, inner_size: int, num_experts: int, activation: str, *, ctx: LayerContext) -> None:
        """Raises ConfigError when inner_size cannot be split, ModelError for an activation without a gated form."""
        super().__init__()
        self.name = ctx.name
        self._ctx = ctx
        self._gate = gate_of(activation)
        self.exchange = ctx.exchange
        """Brings the tokens of all replicas here, where experts are dealt out over several."""
        group = ctx.groups.ep if ctx.expert_parallel else ctx.groups.tp
        self.sums_over = group if group.size > 1 else None
        """The ranks whose results are to be summed, where there are several and no exchange."""
        if ctx.expert_parallel:
            self.held = padded_split(num_experts, group.rank, group.size)
            inner = range(inner_size)
        else:
            self.held = range(num_experts)
            inner = even_split(inner_size, group.rank, group.size, "moe_intermediate_size")
        self.inner = inner
        """Of the inside of each expert, what is held here."""
        parts = []
        for elsewhere in (False, True):
            up = WeightPart((inner_size, size), inner, range(size), elsewhere)
            parts.append((up, up, WeightPart((size, inner_size), range(size), inner, elsewhere)))
        here, others = parts
        of_all = [part for expert in range(num_experts) for part in (here if expert in self.held else others)]
        self._reader = WeightReader(ctx, of_all, self.role)
        """Of the weights of all experts of the model, this rank's or not."""
        self.sizes = ExpertSizes(len(self.held), size, len(inner))
        self.weights: ExpertWeights | None = None
        self._num_awaited = 2 * len(self.held)
        """Of the weights that are computed with, gates and ups in one, those that have not come."""
        self._waiting: dict[int, Tensor | QuantizedTensor] = {}
        """Gates without their up, and the other way round, by shard."""

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        """Every tensor of a checkpoint that belongs to the layer, whichever rank reads it."""
        for shard in range(self._reader.num_shards):
            yield from self._reader.tensors(shard)

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        """Take this rank's part of one tensor of one of its experts."""
        weight = self._reader.take(kind, shard, tensor)
        if weight is None:
            return
        expert, which = divmod(shard, 3)
        if self.weights is None:
            self.weights = self._reader.held.experts(self.sizes, self._ctx.dtype, weight.device, self._gate)
        if which == DOWN:
            self.weights.put_down(expert - self.held.start, stacked([weight], self._ctx.dtype))
            self._num_awaited -= 1
            return
        self._waiting[shard] = weight
        pair = (3 * expert + GATE, 3 * expert + UP)
        if all(part in self._waiting for part in pair):
            gate_up = stacked([self._waiting.pop(part) for part in pair], self._ctx.dtype)
            self.weights.put_gate_up(expert - self.held.start, gate_up)
            self._num_awaited -= 1

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, E], experts [T, K] int32, their weights [T, K] float32 -> [T, E]: this rank's share. Raises ModelError
        while weights are missing."""
        if self._num_awaited > 0:
            raise ModelError(f"{self.name}: {self._num_awaited} of {2 * len(self.held)} weights have not been loaded")
        if self.weights is None:
            return torch.zeros_like(x)  # more ranks than experts: this one has none
        return self.weights.apply(x, chosen, weights, self.held.start)

    def native(self, top_k: int) -> NativeExperts | None:
        """The form in which native code takes the layer, `top_k` experts for a token; None when there is none."""
        if self.weights is None or self._num_awaited > 0:
            return None
        return self.weights.native(self.held.start, top_k)

    def sum_up(self, share: Tensor) -> Tensor:
        """The sum of what the ranks of `sums_over` have computed."""
        return share if self.sums_over is None else self.sums_over.all_reduce(share)
