"""`Codes`: a weight whose integers or 8-bit floats lie apart from their scales. Knows no file format."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.linear_int import BLOCK, FLOAT8, FLOAT8_UNIT, Q4_0, Q4_1, Q8_0, BlockFormat
from pagemill.model.kernels.pack_limits import pack_limits
from pagemill.model.kernels.pack_linear import OCTET, Words
from pagemill.model.loading.nibble_weight import NibbleWeight, WordWeight
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class Codes:
    """What `linear_int.pack_codes` makes panels of or, with `words`, `linear_int.pack_words`."""

    kind: BlockFormat
    codes: Tensor
    """[out, bytes] uint8, or words of int32."""
    limits: Tensor
    """[out, G], of words [G, out]: scales, float16, or scale and minimum, in int32."""
    groups: Tensor
    """[in / 32] int32: which of them a block has."""
    words: Words | None = None
    order: Tensor | None = None
    """[in] int64: which input of `codes` each one is; None: they are in order. Of integers, not of words of outputs."""

    def goes_with(self, other: "Codes") -> bool:
        """Whether the two may lie one under the other."""
        if (self.kind, self.words) != (other.kind, other.words) or not torch.equal(self.groups, other.groups):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)


def codes_of(weight: Tensor | QuantizedTensor) -> Codes | None:
    """A weight's, nothing of which is copied but the scales and zero points; None for one that is of another kind, or
    of which a block of 32 inputs has several scales, or limits that 16-bit floats cannot hold."""
    if isinstance(weight, WordWeight):
        return _of_words(weight)
    if isinstance(weight, NibbleWeight):
        groups, order = _in_order(weight.groups)
        kind = Q4_0 if weight.zeros is None else Q4_1
        return _with_limits(kind, weight.pairs, groups, pack_limits(weight.scales, weight.zeros), order=order)
    if not isinstance(weight, PackedWeight) or weight.bits <= 4 or weight.zeros is not None:
        return None
    codes = weight.values.view(torch.uint8)
    if weight.is_float:
        return _with_limits(FLOAT8, codes, weight.groups, pack_limits(weight.scales, unit=FLOAT8_UNIT))
    groups, order = _in_order(weight.groups)
    return _with_limits(Q8_0, codes, groups, pack_limits(weight.scales), order=order)


def _of_words(weight: WordWeight) -> Codes | None:
    groups, order = _in_order(weight.groups)
    if len(weight) % OCTET or (order is not None and weight.kind is not Words.OF_INPUTS):
        return None
    kind = Q4_1 if weight.zeros is not None else Q8_0 if weight.bits == 8 else Q4_0
    return _with_limits(kind, weight.words, groups, pack_limits(weight.scales, weight.zeros), weight.kind, order)


def _with_limits(
    kind: BlockFormat,
    codes: Tensor,
    groups: Tensor,
    limits: Tensor | None,
    words: Words | None = None,
    order: Tensor | None = None,
) -> Codes | None:
    of_blocks = _of_blocks(groups)
    return None if of_blocks is None or limits is None else Codes(kind, codes, limits, of_blocks, words, order)


def _in_order(groups: Tensor) -> tuple[Tensor, Tensor | None]:
    """Groups [in] of inputs in the order of their groups, and that order, [in] int64; None: they are in order."""
    if bool((groups[1:] >= groups[:-1]).all()):
        return groups, None
    ordered, order = groups.sort(stable=True)
    return ordered, order


def _of_blocks(groups: Tensor) -> Tensor | None:
    """[in] -> [in / 32] int32: the group of each block; None where a block has several, or is none."""
    if len(groups) % BLOCK:
        return None
    blocks = groups.view(-1, BLOCK)
    return blocks[:, 0].int() if bool((blocks == blocks[:, :1]).all()) else None
