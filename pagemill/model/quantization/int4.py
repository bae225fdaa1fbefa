"""Weights of 4-bit integers in groups of inputs, made of a float checkpoint at load. Knows no file format.

Embedding and output head become 8-bit integers, for their errors would be those of all tokens; on a GPU the embedding
stays floats.
"""

import torch
from torch import Tensor

from pagemill.model.kernels.linear_int import BLOCK
from pagemill.model.loading.packed_weight import PackedWeight, neighbours
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.device_made import EIGHT_BITS, NO_WHOLE_GROUPS, Way, on_device
from pagemill.model.quantization.integers import Integers, require
from pagemill.model.quantization.interface import LinearWeight, Quantization, QuantRequest, Uniform
from pagemill.model.quantization.once import Once

STEPS = 15
"""Between the smallest and the largest of a group."""
NARROWEST = 1e-7
"""Of a step: a group of equal weights has none of its own, and a 16-bit float can hold it."""


def quantize(weight: Tensor, size: int) -> PackedWeight:
    """[out, in] of floats, in a multiple of `size` -> the nearest of 16 values between the smallest and the largest of
    each group, of which 0 is always one."""
    groups = weight.float().view(len(weight), -1, size)
    low = groups.amin(-1).clamp(max=0)
    high = groups.amax(-1).clamp(min=0)
    scales = ((high - low) / STEPS).clamp(min=NARROWEST).half()
    wide = scales.float().clamp(min=NARROWEST)
    zeros = (-low / wide).round()
    values = (groups / wide.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp_(0, STEPS)
    return PackedWeight(
        4,
        (values - 8).to(torch.int8).flatten(1),
        scales,
        neighbours(weight.shape[1], size, 0, weight.device),
        (zeros - 8).to(torch.int8),
    )


class Integers4(Integers):
    """Floats in 4 bits, where the inputs are whole groups; in 8 elsewhere."""

    def __init__(self, group_size: int) -> None:
        super().__init__(quantize_floats=True)
        self._group_size = group_size
        self._groups_note = Once(NO_WHOLE_GROUPS)

    def _prepared(self, weight: Tensor | QuantizedTensor, gate: str | None, *, wide: bool) -> LinearWeight:
        width = weight.shape[1]
        if not isinstance(weight, QuantizedTensor) and width % self._group_size == 0:
            weight = quantize(floats(weight, torch.bfloat16), self._group_size)
        elif width % BLOCK == 0:
            self._groups_note.warn(width, self._group_size)
        return super()._prepared(weight, gate, wide=wide)


def make(request: QuantRequest) -> Quantization:
    """Groups of 32, each with its scale. Raises ConfigError where there are no kernels for them."""
    return _make(request, 32, "int4")


def make_64(request: QuantRequest) -> Quantization:
    """Groups of 64."""
    return _make(request, 64, "int4_g64")


def make_128(request: QuantRequest) -> Quantization:
    """Groups of 128."""
    return _make(request, 128, "int4_g128")


def _make(request: QuantRequest, group_size: int, name: str) -> Quantization:
    if request.device.startswith("cuda"):
        return on_device(request.dtype, (Way(quantize, group_size), *EIGHT_BITS))
    require(request, name)
    return Uniform(Integers4(group_size), ends=Integers(quantize_floats=True))
