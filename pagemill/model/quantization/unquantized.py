"""Weights in the model's own type; on a CPU, bfloat16 weights are packed for oneDNN once, at load."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels import ops
from pagemill.model.kernels.linear import pack_bf16, packs_natively
from pagemill.model.kernels.weight_memory import WeightMemory
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.experts import SeparateExperts, StackedExperts
from pagemill.model.quantization.interface import (
    ExpertSizes,
    ExpertWeights,
    LinearWeight,
    Quantization,
    QuantMethod,
    QuantRequest,
    Uniform,
)
from pagemill.model.quantization.panels import GATES, PanelWeight


class PlainWeight(LinearWeight):
    """The tensor as it is."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.weight, bias)


class DeviceWeight(LinearWeight):
    """The tensor as it is, on a GPU; the gated activation is the linear kernel's where it has one."""

    gives_rows = True

    def __init__(self, weight: Tensor, gate: str | None = None) -> None:
        self.plain = self.weight = weight.contiguous()
        self.gate = gate

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear(x, self.weight, bias, self.gate)

    def logits(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, out_dtype=torch.float32)

    def rows(self, indices: Tensor) -> Tensor:
        return functional.embedding(indices, self.weight)

    def norm_apply(
        self, x: Tensor, residual: Tensor | None, norm: tuple[Tensor, float], bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return ops.norm_linear(x, residual, norm, self.weight, bias, self.gate)


class PackedWeight(LinearWeight):
    """oneDNN's blocked layout: faster than the plain tensor for few rows, never slower."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return result


class Unquantized(QuantMethod):
    """Weights stay in the type of the model."""

    def __init__(self, memory: WeightMemory | None = None) -> None:
        self._memory = memory or WeightMemory()

    def prepare(self, weight: Tensor | QuantizedTensor, gate: str | None = None) -> LinearWeight:
        weight = floats(weight, torch.bfloat16)
        if weight.is_cuda:
            return DeviceWeight(weight, gate)
        if _becomes_panels(weight):
            return PanelWeight(pack_bf16(weight, None, GATES[gate], self._memory))
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            return PlainWeight(weight)
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return PackedWeight(weight)
        return PlainWeight(weight)

    def prepare_stacked(
        self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype, gate: str | None = None
    ) -> LinearWeight:
        """Panels are made of the parts where they are: a stack of them would be one copy more."""
        plain = [part for part in parts if isinstance(part, Tensor)]
        if len(plain) < len(parts) or not all(_becomes_panels(part) for part in plain):
            return super().prepare_stacked(parts, dtype, gate)
        return PanelWeight(pack_bf16(plain, None, GATES[gate], self._memory))

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        if device.type == "cpu":
            return SeparateExperts(self, sizes, gate)
        return StackedExperts(sizes, dtype, device, gate)


def _becomes_panels(weight: Tensor) -> bool:
    is_bf16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_bf16 and weight.shape[1] % 2 == 0 and packs_natively()


def make(request: QuantRequest) -> Quantization:
    """Floats everywhere: a quantized file is dequantized."""
    return Uniform(Unquantized())
