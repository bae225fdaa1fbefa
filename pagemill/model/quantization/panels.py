"""`PanelWeight`: any weight in the panels of the native kernels. Knows no format by name."""

import torch
from torch import Tensor

from pagemill.model.kernels.linear import (
    GELU_TANH,
    NO_GATE,
    SILU,
    PackedLinear,
    linear,
    weight_rows,
    with_bias,
)
from pagemill.model.quantization.interface import LinearWeight

GATES = {None: NO_GATE, "silu": SILU, "gelu_tanh": GELU_TANH}
"""Names of gated activations, as `QuantMethod.prepare` has them."""


class PanelWeight(LinearWeight):
    """Panels for the native kernels: read at memory bandwidth for one row, and faster than oneDNN for many; a row's
    result does not depend on the others."""

    def __init__(self, packed: PackedLinear) -> None:
        self.gated = packed.struct.gate != NO_GATE
        self.gives_rows = not self.gated
        self._packed = packed
        self._biased: PackedLinear | None = None

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.native(bias))

    def logits(self, x: Tensor) -> Tensor:
        return linear(x, self._packed, torch.float32)

    def rows(self, indices: Tensor) -> Tensor:
        return weight_rows(indices, self._packed)

    def native(self, bias: Tensor | None) -> PackedLinear:
        if bias is None:
            return self._packed
        if self._biased is None:
            self._biased = with_bias(self._packed, bias)
        return self._biased
