"""`NibbleWeight` and `WordWeight`: integers of 4 bits, or of 8 in words, as files have them. Knows not how they are
computed.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemill.model.kernels.pack_limits import ZeroWords
from pagemill.model.kernels.pack_linear import Words
from pagemill.model.loading.packed_weight import NIBBLE_ZERO, Inputs, PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.zero_words import are_alike, has_whole_words, joined_zeros, outputs_of, zero_integers


class StoredIntegers(QuantizedTensor):
    """Integers that do not lie as in `PackedWeight`, which has them a byte each, a row for each output."""

    __slots__ = ()

    @abstractmethod
    def unpacked(self) -> PackedWeight:
        """The same with an integer in each byte."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.unpacked().dequantized(dtype)

    @abstractmethod
    def joined(self, others: "Sequence[StoredIntegers]") -> "StoredIntegers | None":
        """This and others, one under the other, as they are; None where they differ in more than their numbers."""

    def above(self, others: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
        """With others of any kind that `PackedWeight` goes together with, and as they are where that can be."""
        nibbles = [other for other in others if isinstance(other, StoredIntegers)]
        joined = self.joined(nibbles) if len(nibbles) == len(others) else None
        if joined is not None:
            return joined
        plain = [other.unpacked() if isinstance(other, StoredIntegers) else other for other in others]
        return self.unpacked().above(plain)

    def _with_rows_of_words(self, arrange: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """`with_rows` where words have several outputs: those that stay where they are stay as they are in the file."""
        rows = torch.empty(len(self), 1)
        return self if arrange(rows) is rows else self.unpacked().with_rows(arrange)


@dataclass(frozen=True, slots=True)
class NibbleWeight(StoredIntegers):
    """weight[o, i] = (nibble i of pairs[o] - zero of o and g) * scales[o, g], where g = groups[i]."""

    pairs: Tensor
    """[out, in / 2] uint8, which may be mapped from a file: of two inputs, the first is in the lower half."""
    scales: Tensor
    """[out, G] of any type of float."""
    groups: Tensor
    """[in] int64: which scale each input has. Any order."""
    inputs: Inputs = Inputs.FLOATS
    zeros: ZeroWords | None = None
    """[ceil(out / 8), G]: which integer stands for 0; None: 8 does, everywhere."""

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.pairs), 2 * self.pairs.shape[1]

    @property
    def device(self) -> torch.device:
        return self.pairs.device

    def unpacked(self) -> PackedWeight:
        zeros = None if self.zeros is None else zero_integers(self.zeros, len(self))
        return PackedWeight(4, _integers(self.pairs), self.scales, self.groups, zeros, self.inputs)

    def with_rows(self, arrange: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        if self.zeros is not None:
            return self._with_rows_of_words(arrange)
        return replace(self, pairs=arrange(self.pairs), scales=arrange(self.scales))

    def joined(self, others: Sequence[StoredIntegers]) -> "NibbleWeight | None":
        parts = [self, *(other for other in others if isinstance(other, NibbleWeight) and other.inputs is self.inputs)]
        if len(parts) <= len(others) or not _same_groups(parts):
            return None
        pairs = torch.cat([part.pairs for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return replace(self, pairs=pairs, scales=scales, zeros=joined_zeros([part.zeros for part in parts]))


@dataclass(frozen=True, slots=True)
class WordWeight(StoredIntegers):
    """weight[o, i] = (integer of o and i - zero of o and g) * scales[g, o], where g = groups[i]: outputs lie side by
    side, as in files of GPTQ and AWQ."""

    kind: Words
    words: Tensor
    """int32, as `kind` says, which may be mapped from a file."""
    scales: Tensor
    """[G, out] of any type of float."""
    groups: Tensor
    """[in] int64: which scale each input has. Any order."""
    zeros: ZeroWords | None = None
    """[G, out / 8]: which integer stands for 0; None: 8, of 8 bits 128, does, everywhere. Of 4 bits only."""
    bits: int = 4
    """4; or 8, of words of inputs only."""

    def __len__(self) -> int:
        return self.scales.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self.groups)

    @property
    def device(self) -> torch.device:
        return self.words.device

    def unpacked(self) -> PackedWeight:
        if self.kind is Words.OF_OUTPUTS:
            values = outputs_of(self.words).t().contiguous()
        else:
            stored = self.words.t().contiguous().view(torch.uint8)
            values = _integers(stored) if self.bits == 4 else (stored ^ 128).view(torch.int8)
        zeros = None if self.zeros is None else zero_integers(self.zeros, len(self))
        return PackedWeight(self.bits, values, self.scales.t().contiguous(), self.groups, zeros)

    def with_rows(self, arrange: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        return self._with_rows_of_words(arrange)

    def joined(self, others: Sequence[StoredIntegers]) -> "WordWeight | None":
        parts = [self, *(other for other in others if isinstance(other, WordWeight))]
        if len(parts) <= len(others) or not _same_groups(parts):
            return None
        if any((part.kind, part.bits) != (self.kind, self.bits) for part in parts):
            return None
        words = torch.cat([part.words for part in parts], 1)
        scales = torch.cat([part.scales for part in parts], 1)
        return replace(self, words=words, scales=scales, zeros=joined_zeros([part.zeros for part in parts]))


def _same_groups(parts: Sequence[NibbleWeight | WordWeight]) -> bool:
    """Whether all have their inputs in the same groups, and all or none of them zeros, in whole words of one kind."""
    first = parts[0]
    return all(
        are_alike(part.zeros, first.zeros)
        and has_whole_words(part.zeros, len(part))
        and torch.equal(part.groups, first.groups)
        for part in parts
    )


def unpacked(weights: Sequence[Tensor | QuantizedTensor]) -> list[Tensor | QuantizedTensor]:
    """The same weights, with an integer in each byte."""
    return [weight.unpacked() if isinstance(weight, StoredIntegers) else weight for weight in weights]


def _integers(pairs: Tensor) -> Tensor:
    """[out, in / 2] uint8, the first of two inputs in the lower half -> [out, in] int8: their integers less 8."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1).view(torch.int8) - NIBBLE_ZERO
