"""Weights in the model's own type whose products have the same bits in any batch, for `--deterministic` on a GPU."""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.errors import ModelError
from pagemill.model.kernels import ops
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.experts import StackedExperts
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights, LinearWeight, QuantMethod

_INPUTS = 8
"""Inputs come in multiples of this: the copy engine reads rows that begin at multiples of 16 bytes."""
_ALIGNMENT = 16


class InvariantWeight(LinearWeight):
    """A matrix of two-byte floats on a GPU. Norms before and after it are kernels of their own (`plain` is None): those
    that are fused are chosen by the number of rows."""

    gives_rows = True

    def __init__(self, weight: Tensor, gate: str | None = None) -> None:
        """Raises ModelError for a size that the kernels do not take."""
        if weight.shape[1] % _INPUTS:
            raise ModelError(
                f"deterministic=True needs linear layers whose inputs are a multiple of {_INPUTS}, and this model has "
                f"one of {weight.shape[1]}; leave out --deterministic"
            )
        weight = weight.contiguous()
        self.weight = weight if weight.data_ptr() % _ALIGNMENT == 0 else weight.clone()
        self.gate = gate

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return ops.invariant_linear(x, self.weight, bias, self.gate)

    def logits(self, x: Tensor) -> Tensor:
        return ops.invariant_linear(x, self.weight, out_dtype=torch.float32)

    def rows(self, indices: Tensor) -> Tensor:
        return functional.embedding(indices, self.weight)


class InvariantExperts(StackedExperts):
    """The experts of a layer, grouped by expert for any number of tokens."""

    invariant = True


class InvariantFloats(QuantMethod):
    """Weights stay in the type of the model."""

    holds_routers = True

    def prepare(self, weight: Tensor | QuantizedTensor, gate: str | None = None) -> LinearWeight:
        return InvariantWeight(floats(weight, torch.bfloat16), gate)

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        return InvariantExperts(sizes, dtype, device, gate)
