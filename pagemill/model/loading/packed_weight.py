"""`PackedWeight`: the one form that weights of every quantized checkpoint are read into. Knows no file format, and not
how it is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from pagemill.model.kernels.linear_int import (
    BLOCK,
    FLOAT8,
    FLOAT8_UNIT,
    NF4,
    NF4_LEVELS,
    Q4_0,
    Q4_1,
    Q8_0,
    ROWS_AT_ONCE,
    BlockFormat,
)
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.loading.quantized_tensor import QuantizedTensor

HALF_ROUNDING = 2.0**-11
"""Of a value, what the nearest 16-bit float may be off by."""
LEVEL_ERROR = 1e-6
"""By which a table's numbers may differ from those that kernels have."""
NIBBLE_ZERO = 8
"""What is added to a value of 4 bits to store it from 0 up."""


class Inputs(Enum):
    """What a checkpoint wants a layer's inputs to be multiplied as. A device may do so more exactly."""

    FLOATS = "floats"
    INT8 = "8-bit integers"
    FP8 = "8-bit floats"


@dataclass(frozen=True, slots=True)
class PackedWeight(QuantizedTensor):
    """weight[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g], where g = groups[i]."""

    bits: int
    """Of a value, 2 to 8. Integers of b bits are -2^(b-1) to 2^(b-1) - 1, those of 4 bits -8 to 7."""
    values: Tensor
    """[out, in] int8, or 8-bit floats (float8_e4m3fn)."""
    scales: Tensor
    """[out, G] of any type of float; a scale of several outputs is repeated."""
    groups: Tensor
    """[in] int64: which scale each input has. Any order: `sorted_inputs`."""
    zeros: Tensor | None = None
    """[out, G] of any type: which value stands for 0; None: the value 0 does, everywhere."""
    inputs: Inputs = Inputs.FLOATS
    levels: Tensor | None = None
    """[16] float32: what values of 4 bits, from -8 on, stand for, without zeros; None: themselves."""
    halves: bool = False
    """Whether values are twice those of 4-bit floats (e2m1), which integers of `bits` hold."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_float(self) -> bool:
        """Whether values are 8-bit floats."""
        return self.values.is_floating_point()

    @property
    def group_size(self) -> int | None:
        """Inputs of each group, the last of which may be smaller, where neighbours share groups in their order; else
        None."""
        width = len(self.groups)
        size = int((self.groups == self.groups[0]).sum()) if width else 0
        expected = torch.arange(width, device=self.device) // max(size, 1)
        return size if size and torch.equal(self.groups - self.groups[0], expected) else None

    @property
    def description(self) -> str:
        """For a line in the log."""
        kind = "floats" if self.is_float or self.halves else "integers" if self.levels is None else "indices"
        size = self.group_size
        groups = "an order of their own" if size is None else f"groups of {size}"
        return f"{4 if self.halves else self.bits}-bit {kind} in {groups}"

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        made = torch.empty(self.values.shape, dtype=dtype, device=self.device)
        # A few rows at a time: as float32, all would take eight times the file's bytes.
        for begin in range(0, len(made), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            part = self.values[rows].float()
            if self.levels is not None:
                part = self.levels[self.values[rows].int() + NIBBLE_ZERO]
            if self.zeros is not None:
                part -= self.zeros[rows].float()[:, self.groups]
            made[rows] = part.mul_(self.scales[rows].float()[:, self.groups])
        return made

    def with_rows(self, arrange: Callable[[Tensor], Tensor]) -> "PackedWeight":
        values = self.values
        # Not every operation that rearranges knows 8-bit floats; their bytes are as good.
        arranged = arrange(values.view(torch.int8)).view(values.dtype) if self.is_float else arrange(values)
        zeros = None if self.zeros is None else arrange(self.zeros)
        return replace(self, values=arranged, scales=arrange(self.scales), zeros=zeros)

    def with_columns(self, first: int, last: int) -> "PackedWeight":
        """The weight of inputs `first` to `last`, of which there is one, with the scales of their groups."""
        groups = self.groups[first:last]
        held = slice(int(groups.min()), int(groups.max()) + 1)
        zeros = None if self.zeros is None else self.zeros[:, held]
        return replace(
            self,
            values=self.values[:, first:last].contiguous(),
            scales=self.scales[:, held],
            groups=groups - held.start,
            zeros=zeros,
        )

    def above(self, others: Sequence[QuantizedTensor]) -> "PackedWeight | None":
        """Only with others whose inputs are in the same groups."""
        parts = [self, *(other for other in others if isinstance(other, PackedWeight))]
        if len(parts) <= len(others) or any(part.values.dtype != self.values.dtype for part in parts):
            return None
        if any(part.inputs is not self.inputs or not torch.equal(part.groups, self.groups) for part in parts):
            return None
        if not all(_same_levels(part.levels, self.levels) for part in parts):
            return None
        values = torch.cat([part.values.view(torch.int8) for part in parts]).view(self.values.dtype)
        scales = torch.cat([part.scales.float() for part in parts])
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([part._all_zeros().float() for part in parts])
        bits = max(part.bits for part in parts)
        halves = all(part.halves for part in parts)
        return PackedWeight(bits, values, scales, self.groups, zeros, self.inputs, self.levels, halves)

    def sorted_inputs(self) -> "tuple[PackedWeight, Tensor | None]":
        """The weight with its inputs in the order of their groups, and that order, [in] int64: the weight times
        x[:, order] is this one times x. None: they are in order."""
        if bool((self.groups[1:] >= self.groups[:-1]).all()):
            return self, None
        order = self.groups.argsort(stable=True)
        return replace(self, values=self.values[:, order].contiguous(), groups=self.groups[order]), order

    def as_blocks(self) -> BlockTensor | None:
        """The same weight as blocks of the kernels, its scales and minima as 16-bit floats; None where a block of 32
        inputs has several scales, or the kernels' types cannot hold it."""
        width = self.values.shape[1]
        if width % BLOCK:
            return None
        blocks = self.groups.view(-1, BLOCK)
        if not bool((blocks == blocks[:, :1]).all()):
            return None
        if self.is_float:
            return self._float_blocks(blocks[:, 0])
        if self.bits <= 4:
            return self._nibble_blocks(blocks[:, 0])
        return self._byte_blocks(blocks[:, 0])

    def _float_blocks(self, groups: Tensor) -> BlockTensor | None:
        scales = as_halves(self.scales.float() * FLOAT8_UNIT)
        bytes_ = self.values.view(torch.uint8)
        if scales is None or self.zeros is not None or bool(((bytes_ & 127) == 127).any()):  # which are no numbers
            return None
        return _blocks(FLOAT8, [scales[:, groups]], bytes_.view(len(self), -1, BLOCK))

    def _nibble_blocks(self, groups: Tensor) -> BlockTensor | None:
        scales = as_halves(self.scales.float())
        if scales is None:
            return None
        kind = Q4_0
        if self.levels is not None:
            if not _same_levels(self.levels, torch.tensor(NF4_LEVELS)) or self.zeros is not None:
                return None
            kind = NF4
        limits = [scales[:, groups]]
        if self.zeros is not None:
            minima = as_halves(self.scales.float() * (self.zeros.float() + NIBBLE_ZERO).neg_())
            if minima is None:
                return None
            limits.append(minima[:, groups])
        nibbles = (self.values + NIBBLE_ZERO).view(torch.uint8).view(len(self), -1, BLOCK)
        integers = nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4
        return _blocks(kind if self.zeros is None else Q4_1, limits, integers)

    def _byte_blocks(self, groups: Tensor) -> BlockTensor | None:
        scales = as_halves(self.scales.float())
        if scales is None:
            return None
        values = self.values
        if self.zeros is not None:
            shifted = values.float() - self.zeros.float()[:, self.groups]
            values = shifted.to(torch.int8)
            if not torch.equal(values.float(), shifted):
                return None
        return _blocks(Q8_0, [scales[:, groups]], values.view(torch.uint8).view(len(self), -1, BLOCK))

    def _all_zeros(self) -> Tensor:
        return self.scales.new_zeros(self.scales.shape) if self.zeros is None else self.zeros


def neighbours(width: int, size: int, first: int = 0, device: torch.device | None = None) -> Tensor:
    """`PackedWeight.groups` of inputs `first` to first + width, where so many neighbours share a scale and the scales
    begin with that of the first: [width] int64."""
    size = min(size, first + width)  # whoever wrote a file may say any number
    return torch.arange(first, first + width, device=device) // size - first // size


def _same_levels(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(torch.allclose(one.cpu(), other.cpu(), rtol=0, atol=LEVEL_ERROR))


def as_halves(exact: Tensor) -> Tensor | None:
    """Numbers as 16-bit floats; None where these cannot hold one of them to their usual precision."""
    halves = exact.half()
    errors = halves.float().sub_(exact).abs_()
    return halves if bool((errors <= exact.abs().mul_(HALF_ROUNDING)).all()) else None


def _blocks(kind: BlockFormat, limits: list[Tensor], integers: Tensor) -> BlockTensor:
    """`limits`: [out, B] 16-bit floats each; integers [out, B, bytes] uint8."""
    joined = torch.stack(limits, -1).contiguous().view(torch.uint8)
    return BlockTensor(kind, torch.cat([joined, integers], -1).flatten(1))
