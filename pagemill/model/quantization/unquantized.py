"""Weights in the model's own type; on a CPU, bfloat16 weights are packed for oneDNN once, at load."""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.linear import (
    GELU_TANH,
    NO_GATE,
    SILU,
    PackedLinear,
    linear,
    pack_bf16,
    packs_natively,
    with_bias,
)
from pagemill.model.quantization.interface import LinearWeight, QuantMethod


class PlainWeight(LinearWeight):
    """The tensor as it is."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.weight, bias)


class PackedWeight(LinearWeight):
    """oneDNN's blocked layout: up to three times faster than the plain tensor for few rows, never slower."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return result


class PanelWeight(LinearWeight):
    """Panels for the native kernels: read at memory bandwidth for one row, and faster than oneDNN for many; a row's
    result does not depend on the others."""

    def __init__(self, weight: Tensor, gate: str | None) -> None:
        self.gated = gate is not None
        self._gate = GATES[gate]
        self._packed = pack_bf16(weight, None, self._gate)
        self._biased: PackedLinear | None = None

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.native(bias))

    def logits(self, x: Tensor) -> Tensor:
        return linear(x, self._packed, torch.float32)

    def native(self, bias: Tensor | None) -> PackedLinear:
        if bias is None:
            return self._packed
        if self._biased is None:
            self._biased = with_bias(self._packed, bias)
        return self._biased


class Unquantized(QuantMethod):
    """No quantization."""

    def prepare(self, weight: Tensor, gate: str | None = None) -> LinearWeight:
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            return PlainWeight(weight)
        if packs_natively() and weight.shape[1] % 2 == 0:
            return PanelWeight(weight, gate)
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return PackedWeight(weight)
        return PlainWeight(weight)


GATES = {None: NO_GATE, "silu": SILU, "gelu_tanh": GELU_TANH}
