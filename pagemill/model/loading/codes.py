"""`Codes`: a weight whose integers or 8-bit floats lie apart from their scales. Knows no file format."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.linear_int import BLOCK, FLOAT8, FLOAT8_UNIT, Q4_0, Q8_0, BlockFormat
from pagemill.model.loading.nibble_weight import NibbleWeight
from pagemill.model.loading.packed_weight import PackedWeight, as_halves
from pagemill.model.loading.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class Codes:
    """What `linear_int.pack_codes` makes panels of."""

    kind: BlockFormat
    codes: Tensor
    """[out, bytes] uint8."""
    scales: Tensor
    """[out, G] float16."""
    groups: Tensor
    """[in / 32] int32: which of them a block has."""

    def goes_with(self, other: "Codes") -> bool:
        """Whether the two may lie one under the other."""
        return self.kind == other.kind and torch.equal(self.groups, other.groups)


def codes_of(weight: Tensor | QuantizedTensor) -> Codes | None:
    """A weight's, nothing of which is copied but the scales; None for one that is of another kind, or of which a block
    of 32 inputs has several scales, or scales that 16-bit floats cannot hold."""
    unit = 1.0
    if isinstance(weight, NibbleWeight):
        kind = Q4_0
        codes = weight.pairs
    elif isinstance(weight, PackedWeight) and weight.bits > 4 and weight.zeros is None:
        kind = FLOAT8 if weight.is_float else Q8_0
        codes = weight.values.view(torch.uint8)
        unit = FLOAT8_UNIT if weight.is_float else unit
    else:
        return None
    if weight.shape[1] % BLOCK:
        return None
    blocks = weight.groups.view(-1, BLOCK)
    scales = as_halves(weight.scales.float() * unit)
    if scales is None or not bool((blocks == blocks[:, :1]).all()):
        return None
    return Codes(kind, codes, scales, blocks[:, 0].int())
