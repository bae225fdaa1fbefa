"""RMSNorm, with and without the residual sum before it."""

import torch
from torch import Tensor, nn

from pagemill.model.kernels.layer_plan import NormWeight
from pagemill.model.kernels.ops import computed, rms_norm
from pagemill.model.kernels.product import Product
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear
from pagemill.model.loading.stored import LayerTensor


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 (Zhang and Sennrich, 2019).

    `offset` is added to the stored weight: Gemma's checkpoints store weight - 1, and multiply before rounding to
    the model's type; the others round first.
    """

    def __init__(self, size: int, eps: float, *, ctx: LayerContext, offset: float = 0.0) -> None:
        super().__init__()
        self.name = ctx.name
        self.size = size
        self.eps = eps
        self.offset = offset
        self.dtype = ctx.dtype
        self.weight = torch.empty(0)

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """Every tensor of a checkpoint that belongs to the layer: all of it, on every rank."""
        return (LayerTensor.whole("weight", (self.size,)),)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take the checkpoint tensor."""
        self.weight = (tensor.float() + self.offset) if self.offset else tensor.to(self.dtype)

    def forward(self, x: Tensor | Product) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add_forward(self, x: Tensor | Product, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum takes the residual's place."""
        return rms_norm(x, self.weight, self.eps, residual), residual

    def into(self, linear: Linear, x: Tensor | Product, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(linear(norm(x + residual)), x + residual), in one kernel where the weight has one; the sum may take the
        residual's place. Not for layers that exchange data after."""
        weight = linear.weight
        fused = None if weight is None else weight.norm_apply(x, residual, (self.weight, self.eps), linear.bias)
        if fused is not None:
            return fused
        if residual is None:
            x = computed(x)
            return linear(self(x)), x
        normed, residual = self.add_forward(x, residual)
        return linear(normed), residual

    def native(self) -> NormWeight:
        """The form in which native code takes it."""
        return NormWeight(self.weight, self.eps)
