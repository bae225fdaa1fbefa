"""`GroupedIntegers`: a weight of integers, with a scale for each group of inputs of an output. Knows no file format."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.linear_int import BLOCK, Q4_0, Q8_0, ROWS_AT_ONCE
from pagemill.model.loading.block_tensor import BlockTensor

HALF_ROUNDING = 2.0**-11
"""Of a value, what the nearest 16-bit float may be off by."""


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """integers * scales[:, groups]."""

    bits: int
    """4: integers are -8 to 7; 8: -128 to 127."""
    integers: Tensor
    """[out, in] int8."""
    scales: Tensor
    """[out, G] of any type of float."""
    groups: Tensor
    """[in] int64: which scale each input has."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in dtype."""
        made = torch.empty(self.integers.shape, dtype=dtype, device=self.integers.device)
        # A few rows at a time: as float32, all would take eight times the file's bytes.
        for begin in range(0, len(made), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            made[rows] = self.integers[rows].float().mul_(self.scales[rows].float()[:, self.groups])
        return made

    def as_blocks(self) -> BlockTensor | None:
        """The same weight as blocks of the kernels, its scales as 16-bit floats; None where a block of 32 inputs has
        several scales, or a scale is too large or too small for such floats."""
        width = self.integers.shape[1]
        if width % BLOCK:
            return None
        blocks = self.groups.view(-1, BLOCK)
        if not bool((blocks == blocks[:, :1]).all()):
            return None
        exact = self.scales.float()
        halves = exact.half()
        if not bool(((halves.float() - exact).abs() <= exact.abs() * HALF_ROUNDING).all()):
            return None
        limits = halves[:, blocks[:, 0]].unsqueeze(-1).view(torch.uint8)
        integers = self.integers.view(len(limits), -1, BLOCK)
        kind = Q8_0 if self.bits == 8 else Q4_0
        if kind is Q4_0:
            nibbles = (integers + 8).view(torch.uint8)
            integers = nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4
        return BlockTensor(kind, torch.cat([limits, integers.view(torch.uint8)], -1).flatten(1))


def unpack(packed: Tensor, bits: int) -> Tensor:
    """[out, W] int32, each 32 / bits integers that lie side by side, the first in the lowest bits, stored as 0 and up
    -> [out, W * 32 / bits] int8 around 0."""
    as_bytes = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return (as_bytes ^ 0x80).view(torch.int8)
    return torch.stack([as_bytes & 15, as_bytes >> 4], -1).flatten(1).view(torch.int8) - 8
