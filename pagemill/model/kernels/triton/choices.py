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
    """Tiles of skinny.py."""

    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    """Parts of the inputs."""
    early: bool = False
    """The first tiles are asked for before the kernel before has ended; the rows then come by slower loads."""


MAX_SKINNY_ROWS: Final = 64
SKINNY_OUTPUTS: Final = 64
"""Of a program of skinny.py (of each half, where gated): the rows of a tile of the tensor cores."""

# With block_k = 256 * num_warps the row is loaded in the layout of the weight: no barrier in the loop.
GEMV_CANDIDATES: Final = tuple(
    GemvChoice(*tiles)
    for tiles in (
        (2, 1024, 4, 1), (4, 1024, 4, 1), (8, 1024, 4, 1), (1, 2048, 4, 1), (2, 2048, 4, 1), (4, 2048, 4, 1),
        (4, 512, 2, 1), (8, 512, 2, 1), (16, 512, 2, 1), (4, 256, 1, 1), (8, 256, 1, 1), (16, 256, 1, 1),
        (2, 2048, 8, 1), (4, 2048, 8, 1), (4, 512, 4, 1), (8, 512, 4, 1), (16, 256, 4, 1),
        (4, 1024, 4, 3), (8, 1024, 4, 3), (8, 512, 2, 4), (4, 512, 4, 3),
    )
)  # fmt: skip

_SM = 132
_SHARED = 208 << 10
"""Bytes of shared memory of a multiprocessor for tiles under way."""


def skinny_candidates(shape: Shape, rows: int) -> tuple[SkinnyChoice, ...]:
    """What may be fast for a class of rows: programs that all are resident at once, one or two on a multiprocessor,
    or where there are many more outputs, in turns; of the fewest rows also early ones."""
    outputs, size, gated = shape
    found: list[SkinnyChoice] = []
    blocks = -(-outputs // SKINNY_OUTPUTS)
    wide = SKINNY_OUTPUTS * (2 if gated else 1)
    block_k = 64 if gated else 128
    for residents in (1, 2):
        slots = _SM * residents
        split = next((s for s in (8, 7, 6, 5, 4, 3, 2, 1) if s * blocks <= slots), 1)
        if blocks * split < 0.68 * slots or slots < blocks < 4 * slots:
            continue
        stages = min(_SHARED // residents // ((wide + rows) * block_k * 2), 9)
        if stages < 3 or size // split < 2 * block_k:
            continue
        found.append(SkinnyChoice(block_k, 4, stages, split))
    return tuple(dict.fromkeys(found)) + (_early_candidates(shape, rows) if rows <= 16 else ())


def _early_candidates(shape: Shape, rows: int) -> tuple[SkinnyChoice, ...]:
    """All that are resident at once, also such that leave half of the memory to programs of the next kernel."""
    outputs, size, gated = shape
    blocks = -(-outputs // SKINNY_OUTPUTS)
    tile = SKINNY_OUTPUTS * (2 if gated else 1) * 128 * 2
    found = []
    for residents, share in ((1, 1), (1, 2), (2, 2), (3, 3), (4, 4)):
        most = (_SHARED // share - rows * 128 * 2) // tile
        for split in range(1, 9):
            fills = 0.68 <= blocks * split / (_SM * residents) <= 1
            if fills and size // split >= 3 * 128:
                found += [SkinnyChoice(128, 4, stages, split, early=True) for stages in (most, most - 1) if stages > 1]
    return tuple(dict.fromkeys(found))


# fmt: off
GEMV_MEASURED: Final[dict[Shape, GemvChoice]] = {
    (6144, 4096, False): GemvChoice(2, 2048, 4, 1),
    (4096, 4096, False): GemvChoice(2, 2048, 4, 1),
    (12288, 4096, True): GemvChoice(1, 2048, 4, 1),
    (4096, 12288, False): GemvChoice(4, 512, 4, 1),
    (151936, 4096, False): GemvChoice(2, 2048, 8, 1),
    (3072, 2048, False): GemvChoice(1, 2048, 4, 1),
    (2048, 2048, False): GemvChoice(2, 2048, 4, 1),
    (8192, 2048, True): GemvChoice(1, 2048, 4, 1),
    (2048, 8192, False): GemvChoice(2, 2048, 4, 1),
    (128256, 2048, False): GemvChoice(2, 2048, 4, 1),
}
"""On an H200."""

SKINNY_MEASURED: Final[dict[tuple[int, Shape], SkinnyChoice]] = {
    (16, (6144, 4096, False)): SkinnyChoice(128, 4, 4, 3, early=True),
    (16, (4096, 4096, False)): SkinnyChoice(128, 4, 5, 4, early=True),
    (16, (12288, 4096, True)): SkinnyChoice(128, 4, 3, early=True),
    (16, (4096, 12288, False)): SkinnyChoice(128, 4, 3, 8, early=True),
    (16, (151936, 4096, False)): SkinnyChoice(128, 4, 5),
    (32, (6144, 4096, False)): SkinnyChoice(128, 4, 8),
    (32, (4096, 4096, False)): SkinnyChoice(128, 4, 4, 4),
    (32, (4096, 12288, False)): SkinnyChoice(128, 4, 8, 2),
    (32, (151936, 4096, False)): SkinnyChoice(128, 4, 4),
    (64, (4096, 4096, False)): SkinnyChoice(128, 4, 6, 2),
    (64, (4096, 12288, False)): SkinnyChoice(128, 4, 6, 2),
    (64, (151936, 4096, False)): SkinnyChoice(128, 4, 3),
    (16, (3072, 2048, False)): SkinnyChoice(128, 4, 5, 5, early=True),
    (16, (2048, 2048, False)): SkinnyChoice(128, 4, 6, 3, early=True),
    (16, (8192, 2048, True)): SkinnyChoice(128, 4, 3, early=True),
    (16, (2048, 8192, False)): SkinnyChoice(128, 4, 5, 8, early=True),
    (16, (128256, 2048, False)): SkinnyChoice(128, 4, 5),
    (32, (3072, 2048, False)): SkinnyChoice(128, 4, 8, 2),
    (32, (2048, 2048, False)): SkinnyChoice(128, 4, 8, 4),
    (32, (8192, 2048, True)): SkinnyChoice(64, 4, 9),
    (32, (2048, 8192, False)): SkinnyChoice(128, 4, 8, 4),
    (32, (128256, 2048, False)): SkinnyChoice(128, 4, 4),
    (64, (3072, 2048, False)): SkinnyChoice(128, 4, 6, 2),
    (64, (2048, 2048, False)): SkinnyChoice(128, 4, 6, 4),
    (64, (8192, 2048, True)): SkinnyChoice(64, 4, 8),
    (64, (2048, 8192, False)): SkinnyChoice(128, 4, 6, 4),
    (64, (128256, 2048, False)): SkinnyChoice(128, 4, 3),
}
"""By the largest number of rows (16, 32 or 64) and shape: where it is faster than cuBLAS on an H200, or as fast within
a layer, where its start hides behind the kernel before. Nowhere else is it used."""

# fmt: on

SKINNY_ON_HOPPER: Final[frozenset[Shape]] = frozenset(
    {(3072, 2048, False), (2048, 2048, False), (8192, 2048, True), (2048, 8192, False), (128256, 2048, False)}
)
"""Where 2 to 16 rows go to skinny.py on Hopper GPUs, too: a Llama-3.2-1B with 8 requests was not faster otherwise."""

FUSED_NORM_MEASURED: Final[frozenset[Shape]] = frozenset()
"""Where one row's norm is faster inside the linear kernel that follows it than before it."""


def gemv_choice(shape: Shape, dtype: torch.dtype) -> GemvChoice:
    """Tiles for one row."""
    measured = GEMV_MEASURED.get(shape)
    if measured is not None and dtype.itemsize == 2:
        return measured
    if dtype.itemsize == 2 and shape[1] >= 2048:
        return GemvChoice(1 if shape[2] else 2, 2048, 4, 1)
    return GemvChoice(4, 1024 if dtype.itemsize == 2 else 512, 4, 1)


def skinny_choice(num_rows: int, shape: Shape, dtype: torch.dtype) -> SkinnyChoice | None:
    """Tiles for 2 to MAX_SKINNY_ROWS rows of two-byte elements; None where cuBLAS is faster, or was not measured."""
    if not 2 <= num_rows <= MAX_SKINNY_ROWS or dtype.itemsize != 2:
        return None
    return SKINNY_MEASURED.get((rows_class(num_rows), shape))


def rows_class(num_rows: int) -> int:
    """Rows of the tile that holds `num_rows`: 16, 32 or 64."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else MAX_SKINNY_ROWS
