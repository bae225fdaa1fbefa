"""Weights in the model's own type; on a CPU, bfloat16 weights are packed for oneDNN once, at load."""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.linear import pack_bf16, packs_natively
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.quantization.experts import SeparateExperts, StackedExperts
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights, LinearWeight, QuantMethod
from pagemill.model.quantization.panels import GATES, PanelWeight


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


class Unquantized(QuantMethod):
    """No quantization."""

    def prepare(self, weight: Tensor | BlockTensor, gate: str | None = None) -> LinearWeight:
        if isinstance(weight, BlockTensor):
            weight = weight.dequantized(torch.bfloat16)
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            return PlainWeight(weight)
        if packs_natively() and weight.shape[1] % 2 == 0:
            return PanelWeight(pack_bf16(weight, None, GATES[gate]))
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return PackedWeight(weight)
        return PlainWeight(weight)

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        if device.type == "cpu":
            return SeparateExperts(self, sizes, gate)
        return StackedExperts(sizes, dtype, device, gate)
