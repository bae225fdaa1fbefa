"""`NibbleWeight`: integers of 4 bits as files have them, two in a byte. Knows not how it is computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemill.model.loading.packed_weight import NIBBLE_ZERO, Inputs, PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class NibbleWeight(QuantizedTensor):
    """weight[o, i] = (nibble i of pairs[o] - 8) * scales[o, groups[i]]."""

    pairs: Tensor
    """[out, in / 2] uint8, which may be mapped from a file: of two inputs, the first is in the lower half."""
    scales: Tensor
    """[out, G] of any type of float."""
    groups: Tensor
    """[in] int64: which scale each input has."""
    inputs: Inputs = Inputs.FLOATS

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.pairs), 2 * self.pairs.shape[1]

    @property
    def device(self) -> torch.device:
        return self.pairs.device

    def unpacked(self) -> PackedWeight:
        """The same with an integer in each byte."""
        values = torch.stack([self.pairs & 15, self.pairs >> 4], -1).flatten(1).view(torch.int8) - NIBBLE_ZERO
        return PackedWeight(4, values, self.scales, self.groups, inputs=self.inputs)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.unpacked().dequantized(dtype)

    def with_rows(self, arrange: Callable[[Tensor], Tensor]) -> "NibbleWeight":
        return replace(self, pairs=arrange(self.pairs), scales=arrange(self.scales))

    def above(self, others: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
        """With others of any kind that `PackedWeight` goes together with."""
        plain = [other.unpacked() if isinstance(other, NibbleWeight) else other for other in others]
        return self.unpacked().above(plain)


def unpacked(weights: Sequence[Tensor | QuantizedTensor]) -> list[Tensor | QuantizedTensor]:
    """The same weights, with an integer in each byte."""
    return [weight.unpacked() if isinstance(weight, NibbleWeight) else weight for weight in weights]
