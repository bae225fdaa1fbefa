"""Weights of 8-bit floats with a scale for each block of 128 x 128, made of a float checkpoint at load.

Knows no file format. Half the bytes are held. On a GPU that has 8-bit floats, weights are multiplied as they are; on
other devices, a weight becomes floats whenever it is multiplied with, which is slow, and serves to see what the
precision costs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels import moe
from pagemill.model.kernels.eight_bits import blocks_of_floats
from pagemill.model.kernels.fp8 import FP8, LARGEST, SMALLEST_FACTOR
from pagemill.model.loading.packed_weight import Inputs, PackedWeight, neighbours
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.device import multiplies_eight_bits
from pagemill.model.quantization.device_experts import DeviceExperts
from pagemill.model.quantization.eight_bits import EightBitsWeight
from pagemill.model.quantization.experts import SeparateExperts
from pagemill.model.quantization.fp8 import MIN_CAPABILITY
from pagemill.model.quantization.interface import (
    ExpertSizes,
    ExpertWeights,
    LinearWeight,
    Quantization,
    QuantMethod,
    QuantRequest,
    Uniform,
)
from pagemill.model.quantization.once import Once
from pagemill.model.quantization.unquantized import Unquantized

BLOCK = 128


def quantize(weight: Tensor) -> PackedWeight:
    """[out, in] -> 8-bit floats, the largest of each block being 448. Blocks at the ends are smaller."""
    num_rows, width = weight.shape
    padded = functional.pad(weight.float(), (0, -width % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / LARGEST).clamp(min=SMALLEST_FACTOR)
    values = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).view(padded.shape)
    rows = torch.arange(num_rows, device=weight.device) // BLOCK
    return PackedWeight(
        8,
        values[:num_rows, :width].to(FP8),
        scales[rows],
        neighbours(width, BLOCK, 0, weight.device),
        None,
        Inputs.FP8,
    )


class Fp8BlockWeight(LinearWeight):
    """Held in 8 bits, multiplied as floats of the inputs' type."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self._weight.dequantized(x.dtype), bias)


class BlockExperts(DeviceExperts):
    """The experts of a layer on a GPU: what arrives becomes blocks."""

    def put_gate_up(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        super().put_gate_up(expert, quantize(floats(weight, torch.bfloat16)))

    def put_down(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        super().put_down(expert, quantize(floats(weight, torch.bfloat16)))


class Fp8Blocks(QuantMethod):
    """Linear layers in blocks of 8-bit floats."""

    def __init__(self) -> None:
        self._note = Once("experts of %s are held as %s: this device has no kernel for them")

    def prepare(self, weight: Tensor | QuantizedTensor, gate: str | None = None) -> LinearWeight:
        made = quantize(floats(weight, torch.bfloat16))
        if made.values.is_cuda and torch.cuda.get_device_capability(made.device) >= MIN_CAPABILITY:
            return EightBitsWeight(blocks_of_floats(made.values, made.scales), gate)
        return Fp8BlockWeight(made)

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        if device.type == "cpu":
            return SeparateExperts(self, sizes, gate)

        def tell(weight: PackedWeight) -> None:
            self._note.warn(weight.description, str(dtype)[6:])

        return BlockExperts(sizes, dtype, moe.form_of(gate), (_never_packed, multiplies_eight_bits, tell))


def _never_packed(weight: PackedWeight) -> None:
    """Blocks of 8-bit floats are no integers in groups."""


def make(request: QuantRequest) -> Quantization:
    """Every linear layer in 8 bits; the ends as they are."""
    return Uniform(Fp8Blocks(), ends=Unquantized())
