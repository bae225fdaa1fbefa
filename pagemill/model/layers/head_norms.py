"""Norms of query and key that are not of one head with one weight for all: over all heads, or of weights for each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagemill.model.kernels.ops import rms_norm
from pagemill.model.kernels.plan_parts import NormWeight
from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.part import Part
from pagemill.model.loading.stored import LayerTensor, StoredTensor


@dataclass(frozen=True, slots=True)
class Heads:
    """The query heads, or the key heads, of one layer."""

    count: int
    """Of the model."""
    here: range
    """Of this rank."""
    size: int
    """Of a head."""
    order: Callable[[], Tensor]
    """[D]: a head's elements as they are held here, of those of the checkpoint."""


class RMSNormOfAllHeads(nn.Module):
    """[T, H, D] -> [T, H, D]: RMSNorm over all heads of the model together, of which this rank has some."""

    def __init__(self, heads: Heads, eps: float, *, ctx: LayerContext) -> None:
        super().__init__()
        self.name = ctx.name
        self.eps = eps
        self.weight = torch.empty(0)
        self._heads = heads
        self._group = ctx.groups.tp

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """Every tensor of a checkpoint that belongs to the layer: of this rank's heads."""
        heads = self._heads
        part = Part(0, heads.here.start * heads.size, heads.here.stop * heads.size)
        return (LayerTensor(StoredTensor("weight", (heads.count * heads.size,)), 0, part),)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take the checkpoint tensor."""
        self.weight = tensor.float().view(-1, self._heads.size)

    def native(self) -> NormWeight | None:
        """The form in which native code takes it, over what this rank has; None where others have more."""
        return NormWeight(self.weight.flatten(), self.eps) if self._group.size == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self._group.size == 1:
            return rms_norm(x.flatten(1), self.weight.flatten(), self.eps).view(x.shape)
        wide = x.float()
        # Where ranks share a head, all heads are shared by equally many.
        mean = self._group.all_reduce(wide.square().mean((1, 2), keepdim=True)) / self._group.size
        return (wide * torch.rsqrt(mean + self.eps) * self.weight).to(x.dtype)


class LayerNormOfEachHead(nn.Module):
    """[T, H, D] -> [T, H, D]: LayerNorm of each head, with weights of its own and no bias.

    A checkpoint has the weights in one tensor [H, D], or a tensor for each head (`apart`)."""

    def __init__(self, heads: Heads, eps: float, *, ctx: LayerContext, apart: bool = False) -> None:
        super().__init__()
        self.name = ctx.name
        self.eps = eps
        self.weight = torch.empty(0)
        self._heads = heads
        self._apart = apart
        self._arrived: dict[int, Tensor] = {}

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """Every tensor of a checkpoint that belongs to the layer, this rank's or not."""
        heads = self._heads
        if not self._apart:
            part = Part(0, heads.here.start, heads.here.stop)
            return (LayerTensor(StoredTensor("weight", (heads.count, heads.size)), 0, part),)
        whole = Part(0, 0, heads.size)
        stored = StoredTensor("weight", (heads.size,))
        return tuple(LayerTensor(stored, head, whole if head in heads.here else None) for head in range(heads.count))

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take a checkpoint tensor."""
        if self._apart:
            self._arrived[shard] = tensor
            if len(self._arrived) < len(self._heads.here):
                return
            tensor = torch.stack([self._arrived.pop(head) for head in self._heads.here])
        self.weight = tensor.float()[:, self._heads.order().to(tensor.device)]

    def native(self) -> NormWeight:
        """The form in which native code takes it: a weight for each element of each head."""
        return NormWeight(self.weight.flatten(), self.eps, centers=True)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)
