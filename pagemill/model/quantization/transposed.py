"""Weights that a checkpoint has as [in, out], as GPT-2's: each is turned when it is read."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import Axis, StoredTensor, WeightPart
from pagemill.model.quantization.interface import (
    ExpertSizes,
    ExpertWeights,
    LinearWeight,
    Quantization,
    QuantMethod,
    Role,
)


class Transposed(QuantMethod):
    """Another method's form, of weights that are stored as floats, [in, out]."""

    def __init__(self, method: QuantMethod) -> None:
        self._method = method

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        stored = self._method.tensors(shape)
        if [tensor.kind for tensor in stored] != ["weight"]:
            raise ModelError("quantized weights of an architecture that stores them as [in, out] are not supported")
        return (StoredTensor("weight", (shape[1], shape[0]), rows=Axis(1), columns=Axis(0)),)

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        weight = stored["weight"]
        if not isinstance(weight, Tensor):
            raise ModelError("quantized weights cannot be turned")
        return weight.T.to(dtype).contiguous()

    def prepare(self, weight: Tensor | QuantizedTensor, gate: str | None = None) -> LinearWeight:
        return self._method.prepare(weight, gate)

    def prepare_stacked(
        self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype, gate: str | None = None
    ) -> LinearWeight:
        return self._method.prepare_stacked(parts, dtype, gate)

    def prepare_qkv(self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype) -> LinearWeight:
        return self._method.prepare_qkv(parts, dtype)

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        return self._method.experts(sizes, dtype, device, gate)


class TransposedLinears(Quantization):
    """Another quantization, of linear layers that are stored as [in, out]."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def method(self, module: str, role: Role) -> QuantMethod:
        method = self._quantization.method(module, role)
        return Transposed(method) if role is Role.LINEAR else method
