"""Linear layers: one weight, possibly stacked from several checkpoint tensors. Knows nothing of how it is stored."""

import torch
from torch import Tensor, nn

from pagemill.errors import ModelError
from pagemill.model.layers.context import LayerContext
from pagemill.model.quantization.interface import LinearWeight


class Linear(nn.Module):
    """[T, in] -> [T, sum(out)]. `shards` are the output sizes of the checkpoint tensors that it is stacked from.

    Shards arrive in any order through `load`; when the last one has, the weight takes its computing form and the
    loaded tensors are freed.
    """

    def __init__(self, in_size: int, shards: tuple[int, ...], *, bias: bool, ctx: LayerContext) -> None:
        super().__init__()
        self.name = ctx.name
        self.in_size = in_size
        self.shards = shards
        self.has_bias = bias
        self._ctx = ctx
        self._weights: dict[int, Tensor] = {}
        self._biases: dict[int, Tensor] = {}
        self.weight: LinearWeight | None = None
        self.bias: Tensor | None = None

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take one checkpoint tensor; kind is weight or bias. Raises ModelError on a wrong shape or kind."""
        expected = (self.shards[shard], self.in_size) if kind == "weight" else (self.shards[shard],)
        if kind not in self.expected():
            raise ModelError(f"{self.name} has no {kind}")
        if tuple(tensor.shape) != expected:
            raise ModelError(f"{self.name}.{kind} has shape {tuple(tensor.shape)}, expected {expected}")
        (self._weights if kind == "weight" else self._biases)[shard] = tensor.to(self._ctx.dtype)
        if len(self._weights) == len(self.shards):
            self.weight = self._ctx.quant.prepare(_stack(self._weights))
            self._weights = {}
        if self.has_bias and len(self._biases) == len(self.shards):
            self.bias = _stack(self._biases)
            self._biases = {}

    def expected(self) -> tuple[str, ...]:
        """Kinds of tensors that every shard has."""
        return ("weight", "bias") if self.has_bias else ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.apply(x, self.bias)  # type: ignore[union-attr]


def _stack(parts: dict[int, Tensor]) -> Tensor:
    ordered = [parts[index] for index in sorted(parts)]
    return ordered[0].contiguous() if len(ordered) == 1 else torch.cat(ordered)
