"""Floats of 4 and 8 bits as checkpoints store them: e2m1 in pairs, and the exponents (e8m0) that groups of them share.

Knows no file format. (OCP Microscaling Formats 1.0, 2023.)
"""

import torch
from torch import Tensor

from pagemill.model.kernels.packed import HALVES

HALVES_BITS = 5
"""Of integers that are twice such floats."""
MANTISSA_BITS = 23
"""Of a 32-bit float, whose exponents have the same bias, 127; its smallest ones begin at 1."""
EXPONENTS = range(255)
"""What an exponent may be; 255 stands for no number."""
USUAL_EXPONENTS = range(118, 124)
"""Of weights: the scales 2^-9 to 2^-4."""


def unpack_halves(packed: Tensor) -> Tensor:
    """[..., W] uint8, two e2m1 floats each, the first in the low bits -> [..., 2 * W] int8: twice their values."""
    table = HALVES.to(packed.device)
    return torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1).flatten(-2)


def powers(exponents: Tensor) -> Tensor:
    """uint8 e8m0 -> float32 powers of two, the same bits in another place."""
    bits = exponents.int() << MANTISSA_BITS
    return bits.where(exponents > 0, 1 << MANTISSA_BITS - 1).view(torch.float32)
