"""`QuantMethod`: holds the weight of one kind of linear layer. Knows no model."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.loading.block_tensor import BlockTensor


class LinearWeight(ABC):
    """The weight of one linear layer, in whatever form its method computes fastest."""

    gated: bool = False
    """Whether `apply` includes the gated activation that the layer was made for: [T, in] -> [T, out / 2]."""

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] -> [T, out]."""

    def logits(self, x: Tensor) -> Tensor:
        """`apply` for an output head: float32."""
        return self.apply(x, None).to(torch.float32)

    def norm_apply(
        self, x: Tensor, residual: Tensor | None, norm: tuple[Tensor, float], bias: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """(apply(norm(x + residual)), x + residual), where the norm (weight and eps) may be part of the kernel; None
        where it is for the caller to apply."""
        return None

    gives_rows: bool = False
    """Whether `rows` works, so that an embedding can share the weight."""

    def rows(self, indices: Tensor) -> Tensor:
        """[T] int64 -> [T, in]: rows of the weight. Raises TypeError where it has none to give."""
        raise TypeError(f"{type(self).__name__} gives no rows")

    def native(self, bias: Tensor | None) -> PackedLinear | None:
        """The form in which native code takes it; None when there is none."""
        return None


class QuantMethod(ABC):
    """Turns a loaded weight into its computing form."""

    takes_blocks: bool = False
    """Whether `prepare` takes the blocks of integers of a quantized file."""

    @abstractmethod
    def prepare(self, weight: Tensor | BlockTensor, gate: str | None = None) -> LinearWeight:
        """[out, in] in the model's type -> the computing form. The given tensor may be freed afterwards.

        `gate` names the activation whose gate is the first half of the outputs, where there is one: silu or gelu_tanh.
        """
