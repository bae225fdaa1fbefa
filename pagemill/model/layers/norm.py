"""RMSNorm and LayerNorm."""

from collections.abc import Callable
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from pagemill.model.kernels.ops import layer_norm, rms_norm
from pagemill.model.kernels.plan_parts import NormWeight
from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.stored import LayerTensor

NOT_LOADED = torch.empty(0)
"""A weight that has not been loaded: one for all, as there are many norms."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 (Zhang and Sennrich, 2019).

    `offset` is added to the stored weight: Gemma's checkpoints store weight - 1, and multiply before rounding to
    the model's type; the others round first. Unless `weighted`, there is no weight.
    """

    centers: ClassVar[bool] = False
    """Whether the mean is subtracted first."""

    __setattr__ = object.__setattr__  # type: ignore[assignment]  # as in Linear

    def __init__(self, size: int, eps: float, *, ctx: LayerContext, offset: float = 0.0, weighted: bool = True) -> None:
        super().__init__()
        self.name = ctx.name
        self.size = size
        self.eps = eps
        self.offset = offset
        self.dtype = ctx.dtype
        self.weighted = weighted
        self.weight = NOT_LOADED if weighted else torch.ones(size, dtype=ctx.dtype)

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """Every tensor of a checkpoint that belongs to the layer: all of it, on every rank."""
        return (LayerTensor.whole("weight", (self.size,)),) if self.weighted else ()

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take the checkpoint tensor."""
        self.weight = (tensor.float() + self.offset) if self.offset else tensor.to(self.dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., size] -> [..., size]; with `residual`, of the sum, which it becomes."""
        return rms_norm(x, self.weight, self.eps, residual)

    def native(self) -> NormWeight:
        """The form in which native code takes it."""
        return NormWeight(self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, computed in float32 (Ba, Kiros and Hinton, 2016)."""

    centers: ClassVar[bool] = True

    def __init__(self, size: int, eps: float, *, ctx: LayerContext, bias: bool = True) -> None:
        super().__init__()
        self.name = ctx.name
        self.size = size
        self.eps = eps
        self.dtype = ctx.dtype
        self.weight = torch.empty(0)
        self.bias = torch.empty(0) if bias else None

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """Every tensor of a checkpoint that belongs to the layer: all of it, on every rank."""
        kinds = ("weight",) if self.bias is None else ("weight", "bias")
        return tuple(LayerTensor.whole(kind, (self.size,)) for kind in kinds)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take a checkpoint tensor."""
        setattr(self, kind, tensor.to(self.dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., size] -> [..., size]; with `residual`, of the sum, which it becomes."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual)

    def native(self) -> NormWeight:
        """The form in which native code takes it."""
        return NormWeight(self.weight, self.eps, self.bias, centers=True)


AnyNorm: TypeAlias = RMSNorm | LayerNorm
NormMaker: TypeAlias = Callable[[LayerContext], AnyNorm]
"""Makes the norms of a layer, all alike but for their place."""
