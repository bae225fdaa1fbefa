"""Linear layers whose weights are 8-bit or 4-bit integers: from the blocks of a GGUF file to the kernels' panels.

Knows nothing about files or layers. A block is 32 inputs of one output; what blocks hold is as GGUF defines it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.mirrors import LinearStruct
from pagemill.model.kernels.pack_linear import NO_GATE, PANEL, num_panels, pack_rows
from pagemill.model.kernels.weight_memory import WeightMemory

BLOCK = 32
"""Inputs of a block."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A layout of blocks, and that of the panels they become."""

    name: str
    block_bytes: int
    limit_bytes: int
    """Of a block: scale, and minimum where there is one; the integers follow."""
    panels: int
    """PmFormat in kernels.h."""
    flip: int
    """What 32 bits of integers are xored with when they are packed: signed bytes become unsigned."""


Q8_0 = BlockFormat("Q8_0", 34, 2, 1, -0x7F7F7F80)
Q4_0 = BlockFormat("Q4_0", 18, 2, 2, 0)
Q4_1 = BlockFormat("Q4_1", 20, 4, 3, 0)
FORMATS = {kind.name: kind for kind in (Q8_0, Q4_0, Q4_1)}


def pack_blocks(
    kind: BlockFormat,
    blocks: Tensor | Sequence[Tensor],
    cols: int | None = None,
    gate: int = NO_GATE,
    memory: WeightMemory | None = None,
) -> PackedLinear:
    """Rows of blocks, [N, ceil(K / 32) * block_bytes] uint8, or such one under the other -> panels, in `memory` or a
    mapping of their own; `cols` is K where it is not a multiple of 32.

    With a gate, N is that of both halves. Four inputs of 32 outputs lie side by side.
    """
    parts = [blocks] if isinstance(blocks, Tensor) else blocks
    rows = sum(len(part) for part in parts)
    num_blocks = parts[0].shape[1] // kind.block_bytes
    cols = num_blocks * BLOCK if cols is None else cols
    shape = num_panels(rows, gate), num_blocks, kind.block_bytes * PANEL
    panels = (memory or WeightMemory()).empty(*shape, dtype=torch.uint8)
    struct = LinearStruct(panels.data_ptr(), None, kind.panels, rows, cols, gate)
    pack_rows(struct, parts, panels)
    return PackedLinear(struct, (panels,), rows if gate == NO_GATE else rows // 2)


def quantize_q8(weight: Tensor) -> Tensor:
    """[N, K] float, K a multiple of 32 -> blocks of Q8_0, [N, K / 32 * 34] uint8: the nearest integers, with a scale
    that brings the largest of a block to 127."""
    blocks = torch.empty(len(weight), weight.shape[1] // BLOCK, Q8_0.block_bytes, dtype=torch.uint8)
    # A few rows at a time: the float copy of a vocabulary is larger than the model.
    for begin in range(0, len(weight), ROWS_AT_ONCE):
        part = weight[begin : begin + ROWS_AT_ONCE].float()
        values = part.view(len(part), -1, BLOCK)
        scales = values.abs().amax(-1, keepdim=True).div_(127)
        integers = values.div(scales.clamp_min(1e-30)).round_().to(torch.int8)
        made = blocks[begin : begin + ROWS_AT_ONCE]
        made[..., :2] = scales.half().view(torch.uint8)
        made[..., 2:] = integers.view(torch.uint8)
    return blocks.flatten(1)


def dequantize(kind: BlockFormat, blocks: Tensor) -> Tensor:
    """[N, B * block_bytes] -> [N, B * 32] float32."""
    blocks = blocks.reshape(len(blocks), -1, kind.block_bytes)
    limits = blocks[..., : kind.limit_bytes].contiguous().view(torch.float16).float()
    packed = blocks[..., kind.limit_bytes :].contiguous()
    integers = packed.view(torch.int8).float() if kind == Q8_0 else torch.cat([packed & 15, packed >> 4], -1).float()
    if kind == Q4_0:
        integers -= 8
    values = integers.mul_(limits[..., :1])
    return (values.add_(limits[..., 1:]) if kind == Q4_1 else values).flatten(1)
