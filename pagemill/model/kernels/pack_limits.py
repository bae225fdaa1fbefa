"""`pack_limits`: scales and zero points, as checkpoints have them, to the limits of panels' groups, in one native call.

Knows no format.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.native import loaded_library

SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3}
"""Types of scales, as PmDtype in kernels.h has them."""
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


@dataclass(frozen=True, slots=True)
class ZeroWords:
    """Zero points of 4-bit integers, those of eight neighbouring outputs in a word of 32 bits."""

    words: Tensor
    """int32, [G, out / 8] or [out / 8, G], which may be mapped from a file."""
    dim: int
    """Which of the two dimensions outputs are."""
    places: tuple[int, ...] = IN_ORDER
    """Which four bits of a word, counted from the lowest, each of the eight outputs has."""
    added: int = 0
    """What is added to what is stored; of the sum, four bits are the integer that stands for 0."""
    first: int = 0
    """Which of the first word's outputs is the first, where words have outputs along their first dimension."""


def pack_limits(scales: Tensor, zeros: ZeroWords | None = None, unit: float = 1.0) -> Tensor | None:
    """Scales of any type of float, two dimensions, times `unit` -> the nearest 16-bit floats; with zero points, of the
    same outputs and groups, int32: such a scale and, in the upper half, the minimum, minus scale times zero point.
    None: 16-bit floats do not hold one of them to their usual precision, 2^-11 of it."""
    scales = scales if scales.dtype in SCALES else scales.float()
    scales = scales if scales.stride(1) == 1 else scales.contiguous()
    made = torch.empty(scales.shape, dtype=torch.float16 if zeros is None else torch.int32)
    of_scales = *scales.shape, SCALES[scales.dtype], scales.stride(0)
    if zeros is None:
        lost = loaded_library().pack_limits(
            made.data_ptr(), scales.data_ptr(), None, None, *of_scales, 0, 0, 0, 0, unit
        )
        return None if lost else made
    words = zeros.words if zeros.words.stride(1) == 1 else zeros.words.contiguous()
    shifts = torch.tensor(zeros.places * 2, dtype=torch.int32) * 4
    lost = loaded_library().pack_limits(
        made.data_ptr(), scales.data_ptr(), words.data_ptr(), shifts.data_ptr(), *of_scales, words.stride(0),
        zeros.dim == 0, zeros.first, zeros.added, unit,
    )  # fmt: skip
    return None if lost else made
