"""Tiles of the kernels for weights of packed integers, and where they end. Data only.

`benchmarks/gpu_kernels.py --only w4a16 --sweep` measures the candidates and prints the lines of the table.
"""

from dataclasses import dataclass
from typing import Final

from pagemill.model.kernels.triton.choices import Shape

NUM_PROCESSORS: Final = 132


@dataclass(frozen=True, slots=True)
class PackedChoice:
    """How a product of rows and a weight of packed integers is divided over programs: the tiles and launch options of
    packed_rows.py."""

    block_m: int
    """Rows (tokens) of a program: 8 to 256."""
    block_n: int
    """Outputs of a program (of each half, where gated): 32, 64 or 128."""
    num_warps: int
    num_stages: int
    split_k: int = 1
    """Parts of the inputs."""
    late: bool = True
    """Scales are applied to the sums of a group; otherwise to the weights, rounded to the type of the rows."""
    slices: int = 0
    """Spans of inputs that a program multiplies at a time, of a single row (packed_gemv.py); 0: packed_rows.py."""
    prefetch: int = 0
    """Bytes of the weight, of those that a program reads first, that it has fetched into the L2 cache before the kernel
    before has ended (compute capability 9.0)."""


ROW_CLASSES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
"""Numbers of rows for which choices are measured; each stands for those up to it, from the one before."""
PREFETCHES: Final = (0, 8 << 10, 32 << 10, 128 << 10)
MAX_ROWS: Final = 1024
"""More rows are multiplied by cuBLAS, with the weight dequantized to a tensor that lives as long as the product."""

# fmt: off
PACKED_MEASURED: Final[dict[tuple[int, Shape, int], PackedChoice]] = {
    (1, (6144, 4096, False), 4): PackedChoice(1, 8, 4, 1, slices=32),
    (2, (6144, 4096, False), 4): PackedChoice(8, 64, 2, 6, split_k=8, prefetch=32 << 10),
    (4, (6144, 4096, False), 4): PackedChoice(8, 64, 2, 6, split_k=8, prefetch=16 << 10),
    (8, (6144, 4096, False), 4): PackedChoice(8, 64, 2, 6, split_k=8, prefetch=32 << 10),
    (16, (6144, 4096, False), 4): PackedChoice(16, 128, 4, 4, split_k=8, prefetch=32 << 10),
    (32, (6144, 4096, False), 4): PackedChoice(32, 64, 4, 6, split_k=4, prefetch=16 << 10),
    (64, (6144, 4096, False), 4): PackedChoice(64, 128, 4, 4, split_k=4, prefetch=16 << 10),
    (128, (6144, 4096, False), 4): PackedChoice(64, 128, 4, 4, split_k=2, late=False),
    (256, (6144, 4096, False), 4): PackedChoice(64, 128, 4, 3, split_k=2, late=False),
    (1024, (6144, 4096, False), 4): PackedChoice(128, 128, 8, 3, late=False),
    (1, (4096, 4096, False), 4): PackedChoice(1, 16, 4, 1, slices=32),
    (2, (4096, 4096, False), 4): PackedChoice(8, 128, 4, 4, split_k=4, prefetch=16 << 10),
    (4, (4096, 4096, False), 4): PackedChoice(8, 64, 2, 4, split_k=4, prefetch=8 << 10),
    (8, (4096, 4096, False), 4): PackedChoice(8, 128, 4, 4, split_k=4, prefetch=16 << 10),
    (16, (4096, 4096, False), 4): PackedChoice(16, 64, 4, 6, split_k=8, prefetch=16 << 10),
    (32, (4096, 4096, False), 4): PackedChoice(32, 128, 4, 6, split_k=4, prefetch=8 << 10),
    (64, (4096, 4096, False), 4): PackedChoice(64, 64, 4, 4, split_k=4),
    (128, (4096, 4096, False), 4): PackedChoice(128, 64, 4, 4, split_k=2, late=False),
    (256, (4096, 4096, False), 4): PackedChoice(64, 128, 4, 4, split_k=2, late=False),
    (1024, (4096, 4096, False), 4): PackedChoice(128, 128, 4, 3, late=False),
    (1, (12288, 4096, True), 4): PackedChoice(8, 128, 4, 4, split_k=4, prefetch=8 << 10),
    (2, (12288, 4096, True), 4): PackedChoice(8, 128, 4, 4, split_k=4, prefetch=16 << 10),
    (4, (12288, 4096, True), 4): PackedChoice(8, 128, 4, 4, split_k=4, prefetch=16 << 10),
    (8, (12288, 4096, True), 4): PackedChoice(8, 128, 4, 4, split_k=4, prefetch=16 << 10),
    (16, (12288, 4096, True), 4): PackedChoice(16, 128, 4, 4, split_k=4, prefetch=16 << 10),
    (32, (12288, 4096, True), 4): PackedChoice(32, 64, 4, 4, split_k=2, prefetch=16 << 10),
    (64, (12288, 4096, True), 4): PackedChoice(64, 64, 4, 4, prefetch=8 << 10),
    (128, (24576, 4096, False), 4): PackedChoice(64, 128, 4, 3, late=False),
    (256, (24576, 4096, False), 4): PackedChoice(128, 128, 8, 3, late=False),
    (1024, (24576, 4096, False), 4): PackedChoice(128, 128, 4, 3, late=False),
    (1, (4096, 12288, False), 4): PackedChoice(8, 32, 2, 6, split_k=8, prefetch=8 << 10),
    (2, (4096, 12288, False), 4): PackedChoice(8, 32, 2, 6, split_k=8, prefetch=8 << 10),
    (4, (4096, 12288, False), 4): PackedChoice(8, 32, 2, 6, split_k=8, prefetch=16 << 10),
    (8, (4096, 12288, False), 4): PackedChoice(8, 32, 2, 6, split_k=8),
    (16, (4096, 12288, False), 4): PackedChoice(16, 64, 4, 6, split_k=8, prefetch=8 << 10),
    (32, (4096, 12288, False), 4): PackedChoice(32, 128, 4, 6, split_k=8, prefetch=8 << 10),
    (64, (4096, 12288, False), 4): PackedChoice(64, 64, 4, 4, split_k=4, prefetch=32 << 10),
    (128, (4096, 12288, False), 4): PackedChoice(128, 64, 4, 4, split_k=2, late=False),
    (256, (4096, 12288, False), 4): PackedChoice(64, 128, 4, 4, split_k=2, late=False),
    (1024, (4096, 12288, False), 4): PackedChoice(128, 128, 4, 3, late=False),
}
"""By class of rows, shape and bits. On an H200."""
# fmt: on


def rows_class(num_rows: int) -> int:
    """The least of ROW_CLASSES that is not below `num_rows`, or the largest."""
    return next((rows for rows in ROW_CLASSES if num_rows <= rows), ROW_CLASSES[-1])


def packed_choice(num_rows: int, shape: Shape, bits: int) -> PackedChoice:
    """What was measured for a class of rows and a shape, or by a rule."""
    rows = rows_class(num_rows)
    measured = PACKED_MEASURED.get((rows, shape, bits))
    return measured or _by_rule(rows, shape)


def _by_rule(rows: int, shape: Shape) -> PackedChoice:
    """Enough programs for all multiprocessors, by splitting the inputs where there are few outputs."""
    outputs, size, gated = shape
    if rows > 64:
        return PackedChoice(128, 128, 8, 3, late=False)
    block_m = max(8, rows)
    wanted = NUM_PROCESSORS * (3 if rows <= 16 else 2)
    blocks = -(-outputs // 64)
    split = 1
    while split < 8 and blocks * split * 2 <= wanted * 4 // 3 and size // (split * 2) >= 512:
        split *= 2
    return PackedChoice(block_m, 64, 4, 4 if rows <= 32 and not gated else 3, split, prefetch=16384)


def candidates(rows: int, shape: Shape) -> tuple[PackedChoice, ...]:
    """What may be fast for a class of rows."""
    outputs, size, gated = shape
    found: list[PackedChoice] = []
    if rows > 64:
        tiles = ((128, 128, 8), (256, 128, 8), (128, 64, 4), (128, 128, 4), (64, 128, 4), (256, 64, 4))
        splits = (1, 2) if outputs <= 6144 else (1,)
        found += [
            PackedChoice(block_m, block_n, warps, stages, split, late)
            for block_m, block_n, warps in tiles
            for stages in (3, 4)
            for split in splits
            for late in ((False, True) if (block_m, block_n, warps) == (128, 128, 8) else (False,))
            if split == 1 or rows <= 256
        ]
        return tuple(found)
    block_m = max(8, rows)
    if rows == 1:
        found += [
            PackedChoice(1, block_n, warps, 1, slices=slices)
            for block_n in ((2, 4, 8) if gated else (2, 4, 8, 16))
            for slices, warps in ((8, 1), (16, 2), (32, 4), (32, 2), (64, 4), (16, 4), (32, 8))
            if slices * 128 <= size
        ]
    for block_n, warps in ((64, 4), (32, 2), (64, 2), (128, 4)):
        blocks = -(-outputs // block_n)
        for split in (1, 2, 4, 8):
            programs = blocks * split / NUM_PROCESSORS
            if not 0.9 <= programs * warps / 4 <= 9 or size // split < 512:
                continue
            for stages in (4, 6):
                if stages * block_n * (2 if gated else 1) * 64 + stages * block_m * 256 > 100 << 10:
                    continue
                found.append(PackedChoice(block_m, block_n, warps, stages, split, prefetch=16384))
    return tuple(found)
