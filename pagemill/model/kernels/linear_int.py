"""Linear layers whose weights have 8 or 4 bits: from the blocks of a GGUF file to the kernels' panels.

Knows nothing about files or layers. A block is 32 inputs of one output; blocks of integers are as GGUF defines them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.mirrors import LinearStruct
from pagemill.model.kernels.pack_linear import (
    NO_GATE,
    OCTET,
    PANEL,
    Words,
    num_panels,
    pack_octets_of_words,
    pack_rows,
    pack_rows_of_codes,
)
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

    @property
    def layout(self) -> int:
        """`panels`, whatever is multiplied with them."""
        return self.panels % WIDE_INPUTS


Q8_0 = BlockFormat("Q8_0", 34, 2, 1, -0x7F7F7F80)
Q4_0 = BlockFormat("Q4_0", 18, 2, 2, 0)
Q4_1 = BlockFormat("Q4_1", 20, 4, 3, 0)
FORMATS = {kind.name: kind for kind in (Q8_0, Q4_0, Q4_1)}
"""Of GGUF."""
NF4 = BlockFormat("NF4", 18, 2, 4, 0)
"""As Q4_0, but each half byte is an index of `NF4_LEVELS`."""
FLOAT8 = BlockFormat("FLOAT8", 34, 2, 5, 0)
"""As Q8_0, but with floats (e4m3), and a scale that is `FLOAT8_UNIT` times as large."""
WIDE_INPUTS = 16
"""Added to `panels`: inputs become integers of 16 bits, not 8."""
WIDE = {name: replace(kind, name=f"{name}_WIDE", panels=kind.panels + WIDE_INPUTS) for name, kind in FORMATS.items()}
"""By the name of the format of integers."""
PANEL_FORMATS = {kind.name: kind for kind in (*FORMATS.values(), NF4, FLOAT8, *WIDE.values())}
FLOAT8_UNIT = 256.0
"""So that 16-bit floats hold the scales: the largest of a weight is 448."""
NF4_LEVELS = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip
"""Of bitsandbytes (Dettmers et al., "QLoRA", 2023). They are multiplied as the nearest bfloat16."""


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
    num_blocks = parts[0].shape[1] // kind.block_bytes
    rows = sum(map(len, parts))
    made = _without_weight(kind, rows, num_blocks, num_blocks * BLOCK if cols is None else cols, gate, memory)
    pack_rows(made.struct, parts, made.tensors[0])
    return made


def pack_codes(
    kind: BlockFormat,
    codes: Sequence[Tensor],
    limits: Sequence[Tensor],
    groups: Tensor,
    order: Tensor | None = None,
    gate: int = NO_GATE,
    memory: WeightMemory | None = None,
) -> PackedLinear | None:
    """The same of rows [N, bytes] of integers or 8-bit floats, half bytes the lower first, and limits [N, G] as blocks
    of `kind` have them: scales, float16, or scale and minimum, in int32; groups [K / 32] int32: which of them a block
    has. `order`: [K] int64, which input of theirs each of the panels' is, not of floats. None: some 8-bit floats are no
    numbers."""
    made = _without_weight(kind, sum(map(len, codes)), len(groups), len(groups) * BLOCK, gate, memory)
    return made if pack_rows_of_codes(made.struct, codes, limits, groups, order, made.tensors[0]) else None


def pack_words(
    kind: BlockFormat,
    words: Words,
    codes: Sequence[Tensor],
    limits: Sequence[Tensor],
    groups: Tensor,
    order: Tensor | None = None,
    gate: int = NO_GATE,
    memory: WeightMemory | None = None,
) -> PackedLinear | None:
    """The same of integers in words of 32 bits whose outputs lie side by side, and limits [G, N]. `order`: [K]
    int64, which input of theirs each of the panels' is, of words of inputs only. None: outputs of an octet would not
    stay together."""
    rows = sum(part.shape[1] for part in limits)
    if any(part.shape[1] % OCTET for part in limits) or (gate != NO_GATE and rows // 2 % OCTET):
        return None
    made = _without_weight(kind, rows, len(groups), len(groups) * BLOCK, gate, memory)
    pack_octets_of_words(made.struct, words, codes, limits, groups, order, made.tensors[0])
    return made


def _without_weight(
    kind: BlockFormat, rows: int, num_blocks: int, cols: int, gate: int, memory: WeightMemory | None
) -> PackedLinear:
    """Panels of any values for so many rows."""
    shape = num_panels(rows, gate), num_blocks, kind.block_bytes * PANEL
    panels = (memory or WeightMemory()).empty(*shape, dtype=torch.uint8)
    struct = LinearStruct(panels.data_ptr(), None, kind.panels, rows, cols, gate)
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
    if kind in (NF4, FLOAT8):
        return _numbers(kind, packed).mul_(limits).flatten(1)
    eight_bits = kind.layout == Q8_0.layout
    integers = packed.view(torch.int8).float() if eight_bits else torch.cat([packed & 15, packed >> 4], -1).float()
    if kind.layout == Q4_0.layout:
        integers -= 8
    values = integers.mul_(limits[..., :1])
    return (values.add_(limits[..., 1:]) if kind.layout == Q4_1.layout else values).flatten(1)


def _numbers(kind: BlockFormat, packed: Tensor) -> Tensor:
    """What the codes of blocks stand for, as they are multiplied with the scales of the blocks; float32."""
    if kind == FLOAT8:
        return packed.view(torch.float8_e4m3fn).float().div_(FLOAT8_UNIT)
    levels = torch.tensor(NF4_LEVELS).bfloat16().float()
    return levels[torch.cat([packed & 15, packed >> 4], -1).int()]
