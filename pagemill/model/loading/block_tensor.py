"""`BlockTensor`: a weight as a file stores it, blocks of integers with their scales. Knows neither files nor layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.linear_int import BLOCK, Q8_0, BlockFormat, dequantize, quantize_q8


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A weight [out, in] whose rows are whole blocks."""

    kind: BlockFormat
    blocks: Tensor
    """[out, in / 32 * bytes of a block] uint8; it may be mapped from the file."""

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight that the blocks stand for."""
        return len(self.blocks), self.blocks.shape[1] // self.kind.block_bytes * BLOCK

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.blocks.device

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in dtype."""
        return dequantize(self.kind, self.blocks).to(dtype)


def floats(weight: Tensor | BlockTensor, dtype: torch.dtype) -> Tensor:
    """The weight as floats, dequantized where it is blocks."""
    return weight.dequantized(dtype) if isinstance(weight, BlockTensor) else weight


def with_rows(weight: Tensor | BlockTensor, arrange: Callable[[Tensor], Tensor]) -> Tensor | BlockTensor:
    """The weight with its rows as `arrange` leaves them, which may order and repeat them only."""
    return BlockTensor(weight.kind, arrange(weight.blocks)) if isinstance(weight, BlockTensor) else arrange(weight)


def stacked(parts: Sequence[Tensor | BlockTensor]) -> Tensor | BlockTensor:
    """One weight of several, one under the other. Blocks of different kinds become 8 bits; beside floats, floats."""
    if len(parts) == 1:
        return parts[0] if isinstance(parts[0], BlockTensor) else parts[0].contiguous()
    blocks = [part for part in parts if isinstance(part, BlockTensor)]
    if len(blocks) < len(parts):
        dtype = next(part.dtype for part in parts if isinstance(part, Tensor))
        return torch.cat([part.dequantized(dtype) if isinstance(part, BlockTensor) else part for part in parts])
    kind = blocks[0].kind
    if any(part.kind != kind for part in blocks):
        return BlockTensor(Q8_0, torch.cat([_as_q8(part) for part in blocks]))
    return BlockTensor(kind, torch.cat([part.blocks for part in blocks]))


def _as_q8(part: BlockTensor) -> Tensor:
    return part.blocks if part.kind == Q8_0 else quantize_q8(dequantize(part.kind, part.blocks))
