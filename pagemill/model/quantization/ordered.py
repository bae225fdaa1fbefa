"""`OrderedWeight`: a weight whose inputs are in another order than those of its layer. Knows no format."""

import torch
from torch import Tensor

from pagemill.model.kernels.linear import PackedLinear, with_order
from pagemill.model.quantization.interface import LinearWeight


class OrderedWeight(LinearWeight):
    """Puts the inputs in order once, and multiplies with the weight as it is held."""

    def __init__(self, weight: LinearWeight, order: Tensor) -> None:
        """`order`: which of the layer's inputs each of the weight's is, [in] int64."""
        self._weight = weight
        self._order = order
        self.gate = weight.gate

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._weight.apply(self._arranged(x), bias)

    def logits(self, x: Tensor) -> Tensor:
        return self._weight.logits(self._arranged(x))

    def native(self, bias: Tensor | None) -> PackedLinear | None:
        packed = self._weight.native(bias)
        return None if packed is None else with_order(packed, self._order)

    def _arranged(self, x: Tensor) -> Tensor:
        return torch.index_select(x, 1, self._order)
