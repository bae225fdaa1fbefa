"""Weights of 8 or 4 bits, multiplied as such by the native kernels, with inputs of 8 bits. Knows no file format."""

import torch
from torch import Tensor

from pagemill.errors import ConfigError
from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.linear_int import BLOCK, Q8_0, pack_blocks, quantize_q8
from pagemill.model.kernels.weight_memory import WeightMemory
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.quantization.experts import SeparateExperts
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
from pagemill.model.quantization.unquantized import Unquantized


class Integers(QuantMethod):
    """Quantized files in their own precision; other weights as they are or, if `quantize_floats`, in 8 bits."""

    takes_blocks = True

    def __init__(self, *, quantize_floats: bool) -> None:
        self._quantize_floats = quantize_floats
        self._memory = WeightMemory()
        self._floats = Unquantized(self._memory)

    def prepare(self, weight: Tensor | BlockTensor, gate: str | None = None) -> LinearWeight:
        if isinstance(weight, Tensor):
            if not self._quantize_floats or weight.shape[1] % BLOCK:
                return self._floats.prepare(weight, gate)
            weight = BlockTensor(Q8_0, quantize_q8(weight))
        return PanelWeight(pack_blocks(weight.kind, weight.blocks, gate=GATES[gate], memory=self._memory))

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        return SeparateExperts(self, sizes, gate)


def runs(request: QuantRequest) -> bool:
    """Whether the kernels do."""
    return request.device == "cpu" and request.dtype == torch.bfloat16 and packs_natively()


def as_stored(request: QuantRequest) -> QuantMethod:
    """Integers in the precision of the file where the kernels run and nothing else is asked for; floats elsewhere."""
    return Integers(quantize_floats=False) if runs(request) and not request.dequantize else Unquantized()


def make(request: QuantRequest) -> Quantization:
    """8-bit integers of float weights, too. Raises ConfigError where the kernels cannot run."""
    if not runs(request):
        raise ConfigError(
            f"quantization=int8 needs the native CPU kernels and dtype=bfloat16; here dtype={str(request.dtype)[6:]}, "
            f"device {request.device}; use --dtype bfloat16, or leave out --quantization"
        )
    return Uniform(Integers(quantize_floats=True))
