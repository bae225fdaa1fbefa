"""`QuantMethod`: holds the weight of one kind of linear layer. Knows no model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels import ops
from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.product import Product
from pagemill.model.loading.block_tensor import BlockTensor


class LinearWeight(ABC):
    """The weight of one linear layer, in whatever form its method computes fastest."""

    def gates(self, x: Tensor) -> bool:
        """Whether `apply` of an input like x includes the gated activation that the layer was made for: [T, in] ->
        [T, out / 2]. Where not, `gated_apply` of the layer that follows may."""
        return False

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] -> [T, out]."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | Product:
        """`apply`, for a norm to take, which may do part of the work."""
        return self.apply(x, bias)

    def gated_apply(self, x: Tensor, gate: str, bias: Tensor | None) -> Tensor:
        """`apply` of act(first half of x) * second half: [T, 2 * in] -> [T, out]."""
        return self.apply(ops.gated(x, gate), bias)

    def logits(self, x: Tensor) -> Tensor:
        """`apply` for an output head: float32."""
        return self.apply(x, None).to(torch.float32)

    def norm_apply(
        self, x: Tensor | Product, residual: Tensor | None, norm: tuple[Tensor, float], bias: Tensor | None
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


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of the experts of one layer that a rank holds."""

    num_experts: int
    size: int
    """E, of a token."""
    inner_size: int
    """I, between the two linear layers of an expert."""


class ExpertWeights(ABC):
    """The experts of one layer that a rank holds: each a gated linear layer and one back."""

    @abstractmethod
    def put_gate_up(self, expert: int, weight: Tensor) -> None:
        """[2 * I, E] of one expert, counted from 0 on this rank; the tensor may be freed afterwards."""

    @abstractmethod
    def put_down(self, expert: int, weight: Tensor) -> None:
        """[E, I] of one expert."""

    @abstractmethod
    def apply(self, x: Tensor, chosen: Tensor, weights: Tensor, first: int) -> Tensor:
        """The weighted sum of each token's experts: [T, E] -> [T, E]. chosen [T, K] int32 are numbers of the model's
        experts, of which first .. first + num_experts are here; others add nothing. weights [T, K] float32."""


class QuantMethod(ABC):
    """Turns a loaded weight into its computing form."""

    takes_blocks: bool = False
    """Whether `prepare` takes the blocks of integers of a quantized file."""

    @abstractmethod
    def prepare(self, weight: Tensor | BlockTensor, gate: str | None = None) -> LinearWeight:
        """[out, in] in the model's type -> the computing form. The given tensor may be freed afterwards.

        `gate` names the activation whose gate is the first half of the outputs, where there is one: silu or gelu_tanh.
        """

    def prepare_head(self, weight: Tensor | BlockTensor) -> LinearWeight:
        """`prepare` for an output head."""
        return self.prepare(weight)

    @abstractmethod
    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        """Room for the experts of a layer, whose weights come in the model's type; `gate` as for `prepare`."""
