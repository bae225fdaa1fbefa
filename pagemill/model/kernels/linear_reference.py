"""What a linear layer on packed weights computes, in plain torch: its panels are taken apart and multiplied as floats.

Knows the layouts, not who packed them. The definition that the kernels are tested against, and the way without them.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.linear import BF16_PANELS, SILU
from pagemill.model.kernels.linear_int import (
    BLOCK,
    FLOAT8,
    NF4,
    PANEL_FORMATS,
    Q4_0,
    Q8_0,
    WIDE_INPUTS,
    BlockFormat,
    dequantize,
)
from pagemill.model.kernels.pack_linear import NO_GATE, PANEL
from pagemill.model.kernels.reference import gated, quantized_linear

FORMAT_NAMES = {BF16_PANELS: "BF16", **{kind.panels: kind.name for kind in PANEL_FORMATS.values()}}
"""PmFormat -> the name of what is in the panels."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    format_name: str,
    sizes: tuple[int, int],
    gate: int = NO_GATE,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[M, K] bfloat16 -> [M, N], gated [M, N / 2], in `out_dtype`; `weight` is panels, `sizes` are (N, K)."""
    if format_name == "BF16":
        result = functional.linear(x.float(), _bf16_rows(weight, sizes, gate).float())
    else:
        kind = PANEL_FORMATS[format_name]
        blocks = unpacked_blocks(kind, weight, sizes, gate)
        if kind in (NF4, FLOAT8):
            result = functional.linear(x.float(), dequantize(kind, blocks.flatten(1))[:, : sizes[1]])
        else:
            result = quantized_linear(x, *block_parts(kind, blocks), wide=kind.panels >= WIDE_INPUTS)
    if bias is not None:
        result = result + bias
    if gate != NO_GATE:
        result = gated(result.bfloat16(), gate != SILU)
    return result.to(out_dtype)


def as_panels(weight: Tensor, format_name: str, sizes: tuple[int, int]) -> Tensor:
    """The bytes of a packed weight in the shape of its format: [P, K / 2, 32, 2], or [P, B, 32 * block_bytes]."""
    if format_name == "BF16":
        return weight.view(torch.bfloat16).view(-1, sizes[1] // 2, PANEL, 2)
    return weight.view(torch.uint8).view(-1, -(-sizes[1] // BLOCK), PANEL * PANEL_FORMATS[format_name].block_bytes)


def dequantized(weight: Tensor, format_name: str, sizes: tuple[int, int], gate: int = NO_GATE) -> Tensor:
    """Panels -> [N, K] float32; with a gate, the first half of the outputs first."""
    if format_name == "BF16":
        return _bf16_rows(weight, sizes, gate).float()
    kind = PANEL_FORMATS[format_name]
    return dequantize(kind, unpacked_blocks(kind, weight, sizes, gate).flatten(1))[:, : sizes[1]]


def unpacked_blocks(kind: BlockFormat, panels: Tensor, sizes: tuple[int, int], gate: int = NO_GATE) -> Tensor:
    """What `pack_blocks` was given: [N, B, block_bytes] uint8."""
    num_panels = panels.shape[0]
    num_blocks = panels.shape[1]
    limits_end = kind.limit_bytes * PANEL
    limits = panels[..., :limits_end]
    integers = panels[..., limits_end:].contiguous()
    if kind.flip:
        integers = integers.view(torch.int32).bitwise_xor(kind.flip).view(torch.uint8)
    pieces = limits.reshape(num_panels, num_blocks, 1, PANEL, -1), integers.view(num_panels, num_blocks, -1, PANEL, 4)
    ordered = [part.permute(0, 3, 1, 2, 4).reshape(num_panels, PANEL, num_blocks, -1) for part in pieces]
    return _rows_of_panels(torch.cat(ordered, -1), sizes[0], gate)


def block_parts(kind: BlockFormat, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """[N, B, block_bytes] uint8 -> integers [N, B, 32], scales and, where there are any, minima [N, B]; float32."""
    limits = blocks[..., : kind.limit_bytes].contiguous().view(torch.float16).float()
    packed = blocks[..., kind.limit_bytes :].contiguous()
    if kind.layout == Q8_0.layout:
        return packed.view(torch.int8).float(), limits[..., 0], None
    nibbles = torch.cat([packed & 15, packed >> 4], -1).float()
    if kind.layout == Q4_0.layout:
        return nibbles - 8, limits[..., 0], None
    return nibbles, limits[..., 0], limits[..., 1]


def panel_bytes(format_name: str, sizes: tuple[int, int], gate: int = NO_GATE) -> int:
    """Bytes of a packed weight of (N, K)."""
    rows, cols = sizes
    num_panels = -(-rows // PANEL) if gate == NO_GATE else -(-(rows // 2) // (PANEL // 2))
    if format_name == "BF16":
        return num_panels * PANEL * cols * 2
    return num_panels * PANEL * -(-cols // BLOCK) * PANEL_FORMATS[format_name].block_bytes


def _bf16_rows(panels: Tensor, sizes: tuple[int, int], gate: int) -> Tensor:
    """[P, K / 2, 32, 2] -> [N, K] bfloat16."""
    return _rows_of_panels(panels.transpose(1, 2).flatten(2), sizes[0], gate)


def _rows_of_panels(ordered: Tensor, num_rows: int, gate: int) -> Tensor:
    """[P, 32, ...] -> [N, ...]: without what fills the last panel, the halves of a gate one after the other."""
    if gate == NO_GATE:
        return ordered.flatten(0, 1)[:num_rows]
    halves = ordered.view(len(ordered), 2, PANEL // 2, *ordered.shape[2:]).transpose(0, 1).flatten(1, 2)
    return halves[:, : num_rows // 2].flatten(0, 1)
