"""Which kernel computes a linear layer, and with which tiles: rules, and measured choices where there are some.

Data only. `benchmarks/gpu_kernels.py --tune` prints the lines of the tables.
"""

from dataclasses import dataclass
from typing import Final

import torch

Shape = tuple[int, int, bool]
"""Outputs (of one half, where gated), inputs, gated."""


@dataclass(frozen=True, slots=True)
class GemvChoice:
    """Tiles of gemv.py."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    """Tiles of the weight under way at once; 1: what the compiler does by itself."""


@dataclass(frozen=True, slots=True)
class SkinnyChoice:
    """Tiles of skinny.py. `split_k` parts of the inputs are summed by a second kernel."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


MAX_SKINNY_ROWS: Final = 64

GEMV_CANDIDATES: Final = tuple(
    GemvChoice(block_n, block_k, num_warps, num_stages)
    for block_n, block_k, num_warps in (
        (1, 2048, 4), (2, 1024, 4), (4, 512, 4), (4, 1024, 4), (4, 2048, 8), (8, 256, 4), (8, 512, 4), (8, 1024, 8),
        (16, 256, 4), (16, 512, 8), (2, 512, 2), (4, 256, 2),
    )
    for num_stages in (1, 3)
)  # fmt: skip

SKINNY_CANDIDATES: Final = tuple(
    SkinnyChoice(block_n, block_k, num_warps, num_stages, split_k)
    for block_n, block_k, num_warps, num_stages in (
        (16, 256, 4, 4), (32, 128, 4, 5), (32, 256, 4, 4), (64, 128, 4, 5), (128, 64, 4, 6),
    )
    for split_k in (1, 4)
)  # fmt: skip

GEMV_MEASURED: Final[dict[Shape, GemvChoice]] = {}
"""On an H200."""

SKINNY_MEASURED: Final[dict[tuple[int, Shape], SkinnyChoice]] = {}
"""By the largest number of rows (16, 32 or 64) and shape: where it beats cuBLAS on an H200. Nowhere else is it used."""

FUSED_NORM_MEASURED: Final[frozenset[Shape]] = frozenset()
"""Where one row's norm is faster inside the linear kernel that follows it than before it."""


def gemv_choice(shape: Shape, dtype: torch.dtype) -> GemvChoice:
    """Tiles for one row."""
    measured = GEMV_MEASURED.get(shape)
    if measured is not None and dtype.itemsize == 2:
        return measured
    num_outputs, _, gated = shape
    # Many small programs for few outputs, so that every multiprocessor reads; a gate doubles what each holds.
    block_n = 4 if num_outputs <= 8192 or gated else 8
    return GemvChoice(block_n, 512 if dtype.itemsize == 2 else 256, 4, 1)


def skinny_choice(num_rows: int, shape: Shape, dtype: torch.dtype) -> SkinnyChoice | None:
    """Tiles for 2 to MAX_SKINNY_ROWS rows of two-byte elements; None where cuBLAS is faster, or was not measured."""
    if not 2 <= num_rows <= MAX_SKINNY_ROWS or dtype.itemsize != 2:
        return None
    return SKINNY_MEASURED.get((rows_class(num_rows), shape))


def rows_class(num_rows: int) -> int:
    """Rows of the tile that holds `num_rows`: 16, 32 or 64."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else MAX_SKINNY_ROWS
