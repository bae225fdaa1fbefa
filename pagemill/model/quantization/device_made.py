"""Weights of 8- or 4-bit integers on a GPU, made of a float checkpoint at load. Knows no file format."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.model.kernels import moe, packed
from pagemill.model.loading.packed_weight import PackedWeight, neighbours
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.device import DeviceWeights
from pagemill.model.quantization.device_experts import DeviceExperts, Ways
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights, LinearWeight, Quantization, Uniform
from pagemill.model.quantization.once import Once

NO_WHOLE_GROUPS = "layers of %d inputs become integers of 8 bits, not 4: they are no whole groups of %d"


class Way(NamedTuple):
    """One way to round floats."""

    quantize: Callable[[Tensor, int], PackedWeight]
    """(weight [out, in], inputs in a group, of which there are whole ones) -> integers."""
    size: int
    """Of a group."""


def quantize_8(weight: Tensor, size: int) -> PackedWeight:
    """[out, in] of floats, in a multiple of `size` -> integers, as `packed.rounded` makes them."""
    return PackedWeight(8, *packed.rounded(weight, size), neighbours(weight.shape[1], size, 0, weight.device))


EIGHT_BITS = (Way(quantize_8, 128), Way(quantize_8, 32))


class MadeOnDevice(DeviceWeights):
    """Floats become integers in the first way whose groups are whole, those of experts too."""

    def __init__(self, dtype: torch.dtype, ways: Sequence[Way]) -> None:
        """`dtype`: of the model's activations, and of layers that stay floats; `ways`: the best one first."""
        super().__init__(dtype)
        self._ways = ways
        self._bits_note = Once(NO_WHOLE_GROUPS)

    def prepare(self, weight: Tensor | QuantizedTensor, gate: str | None = None) -> LinearWeight:
        return super().prepare(self.made(weight), gate)

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        return _MadeExperts(sizes, dtype, moe.form_of(gate), self.expert_ways, self.made)

    def made(self, weight: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
        """The weight as integers, where it is floats of whole groups."""
        if isinstance(weight, PackedWeight):
            return weight
        width = weight.shape[1]
        way = next((way for way in self._ways if width % way.size == 0), None)
        if way is None:
            self._width_note.warn(width, self._ways[-1].size)
            return weight
        found = way.quantize(floats(weight, self._dtype), way.size)
        if way.quantize is not self._ways[0].quantize:
            self._bits_note.warn(width, self._ways[0].size)
        return found


class _MadeExperts(DeviceExperts):
    """Experts whose weights come as floats."""

    def __init__(
        self,
        sizes: ExpertSizes,
        dtype: torch.dtype,
        form: moe.ExpertForm,
        ways: Ways,
        made: Callable[[Tensor | QuantizedTensor], Tensor | QuantizedTensor],
    ) -> None:
        super().__init__(sizes, dtype, form, ways)
        self._made = made

    def put_gate_up(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        super().put_gate_up(expert, self._made(weight))

    def put_down(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        super().put_down(expert, self._made(weight))


def on_device(dtype: torch.dtype, ways: Sequence[Way] = EIGHT_BITS) -> Quantization:
    """All linear layers and experts; the output head in 8 bits, and an embedding in floats."""
    return Uniform(MadeOnDevice(dtype, ways), ends=DeviceWeights(dtype, quantize_floats=True))
