"""Random weights of 8-bit floats in blocks."""

import torch

from pagemill.model.kernels.eight_bits import BLOCK, EightBits, blocks_of_floats


def blocks(outputs: int, inputs: int, *, shared: bool, device: str = "cpu") -> EightBits:
    """With a scale for 128 x 128, where `shared`, else for 1 x 128."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(outputs, inputs, generator=generator).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    rows = -(-outputs // BLOCK) if shared else outputs
    scales = (torch.rand(rows, -(-inputs // BLOCK), generator=generator) + 0.5) / 100 / inputs**0.5
    spread = scales.repeat_interleave(BLOCK, 0)[:outputs] if shared else scales
    weight = blocks_of_floats(values.to(device), spread.to(device))
    assert weight.rows == (BLOCK if shared else 1)
    return weight
