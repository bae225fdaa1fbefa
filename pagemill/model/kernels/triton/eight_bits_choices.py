"""Tiles of the kernels for weights of 8 bits in blocks of floats, or integers, and where they end. Data only.

`benchmarks/gpu_kernels.py --only fp8-blocks --sweep` measures the candidates and prints the lines of the tables.
"""

from dataclasses import dataclass
from typing import Final

from pagemill.model.kernels.triton.choices import GemvChoice, Shape

NUM_PROCESSORS: Final = 132


@dataclass(frozen=True, slots=True)
class FewChoice:
    """Tiles of eight_bits_rows.py."""

    block_m: int
    """Rows (tokens) of a program."""
    block_n: int
    """Outputs of a program (of each half, where gated)."""
    num_warps: int
    num_stages: int
    split_k: int = 1
    """Parts of the inputs."""


@dataclass(frozen=True, slots=True)
class ManyChoice:
    """Tiles of eight_bits_many.py."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


ROW_CLASSES: Final = (8, 16, 32)
"""Numbers of rows for which choices are measured; each stands for those up to it, from the one before."""
MAX_FEW_ROWS: Final = 32
"""More rows are quantized too."""

ONE_ROW_MEASURED: Final[dict[Shape, GemvChoice]] = {
    (6144, 4096, False): GemvChoice(4, 1024, 2, 1),
    (4096, 4096, False): GemvChoice(16, 512, 8, 1),
    (12288, 4096, True): GemvChoice(1, 1024, 4, 1),
    (4096, 12288, False): GemvChoice(8, 512, 4, 1),
}
"""Of floats in blocks. On an H200."""
# With block_k = K a program asks for all of its weights before it waits for its input.
ONE_ROW_CANDIDATES: Final = tuple(
    GemvChoice(*choice, 1)
    for choice in (
        (1, 1024, 4), (1, 2048, 4), (1, 4096, 4), (1, 4096, 8), (2, 1024, 4), (2, 2048, 4), (2, 4096, 4), (2, 4096, 8),
        (4, 1024, 4), (4, 1024, 2), (4, 2048, 8), (4, 4096, 8), (4, 4096, 16), (8, 1024, 8), (8, 2048, 8), (16, 512, 8),
        (2, 2048, 8), (4, 2048, 4), (8, 512, 4), (8, 1024, 4),
    )
)  # fmt: skip
FEW_MEASURED: Final[dict[tuple[int, Shape], FewChoice]] = {
    (8, (6144, 4096, False)): FewChoice(8, 64, 4, 6, split_k=8),
    (8, (4096, 4096, False)): FewChoice(8, 64, 4, 6, split_k=8),
    (8, (12288, 4096, True)): FewChoice(8, 64, 2, 3, split_k=4),
    (8, (4096, 12288, False)): FewChoice(8, 64, 4, 6, split_k=8),
    (16, (6144, 4096, False)): FewChoice(16, 32, 2, 4, split_k=8),
    (16, (4096, 4096, False)): FewChoice(16, 32, 2, 4, split_k=8),
    (16, (12288, 4096, True)): FewChoice(16, 32, 2, 4, split_k=2),
    (16, (4096, 12288, False)): FewChoice(16, 32, 2, 4, split_k=8),
}
"""By class of rows and shape. On an H200."""
MANY_CANDIDATES: Final = tuple(
    ManyChoice(*tiles)
    for tiles in ((64, 128, 4, 4), (64, 128, 4, 6), (64, 64, 4, 5), (128, 128, 4, 3), (128, 128, 8, 4), (128, 64, 4, 4))
)


def rows_class(num_rows: int) -> int:
    """The least of ROW_CLASSES that is not below `num_rows`, or the largest."""
    return next((rows for rows in ROW_CLASSES if num_rows <= rows), ROW_CLASSES[-1])


def one_row_choice(shape: Shape) -> GemvChoice:
    """What was measured for a row times floats in blocks, or what was good for most."""
    return ONE_ROW_MEASURED.get(shape, GemvChoice(4, 1024, 4, 1))


def few_choice(num_rows: int, shape: Shape) -> FewChoice:
    """What was measured for a class of rows and a shape, or enough programs for all multiprocessors, by splitting the
    inputs where there are few outputs."""
    rows = rows_class(num_rows)
    measured = FEW_MEASURED.get((rows, shape))
    if measured is not None:
        return measured
    outputs, size, gated = shape
    blocks = -(-outputs // 64)
    split = 1
    while split < 8 and blocks * split <= NUM_PROCESSORS * 3 // 2 and size // (split * 2) >= 512:
        split *= 2
    return FewChoice(rows, 64, 4, 3 if gated else 4, split)


def few_candidates(rows: int, shape: Shape) -> tuple[FewChoice, ...]:
    """What may be fast for a class of rows."""
    outputs, size, gated = shape
    found: list[FewChoice] = []
    for block_n, warps in ((64, 4), (32, 2), (64, 2), (128, 4)):
        blocks = -(-outputs // block_n)
        for split in (1, 2, 4, 8):
            programs = blocks * split / NUM_PROCESSORS
            if not 0.9 <= programs * warps / 4 <= 9 or size // split < 512:
                continue
            for stages in (3, 4, 6):
                if stages * (block_n * (2 if gated else 1) * 128 + rows * 256) <= 100 << 10:
                    found.append(FewChoice(rows, block_n, warps, stages, split))
    return tuple(found)


def many_choice(num_rows: int, num_outputs: int) -> ManyChoice:
    """Tiles of 128 x 128 where there are enough of them for all multiprocessors."""
    tiles = -(-num_rows // 128) * -(-num_outputs // 128)
    return ManyChoice(128, 128, 8, 4) if tiles >= NUM_PROCESSORS else ManyChoice(64, 128, 4, 4)
