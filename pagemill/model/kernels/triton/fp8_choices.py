"""Tiles of the kernels for weights of 8-bit floats, and where they end. Data only.

`benchmarks/gpu_moe.py --only fp8-linear --tune` measures the candidates.
"""

from dataclasses import dataclass
from typing import Final

from pagemill.model.kernels.triton.choices import GemvChoice, Shape


@dataclass(frozen=True, slots=True)
class FewRowsChoice:
    """Tiles of a few rows times a weight; `split_k` parts of the inputs are summed by a second kernel."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


MAX_FEW_ROWS: Final = 32
"""More rows are quantized too, and go to the 8-bit product of cuBLAS; so do these, but for one, where there are tiles
of our choice (fp8_tiles.py)."""

# With block_k = K a program asks for all of its weights before it waits for its input.
ONE_ROW_CANDIDATES: Final = tuple(
    GemvChoice(*choice)
    for choice in (
        (1, 2048, 4, 1), (2, 1024, 4, 1), (2, 2048, 4, 1), (4, 512, 4, 1), (4, 1024, 4, 1), (4, 2048, 8, 1),
        (8, 512, 4, 1), (8, 1024, 8, 1), (16, 512, 8, 1), (1, 4096, 4, 1), (4, 1024, 4, 3), (8, 512, 4, 3),
        (2, 4096, 4, 1), (1, 4096, 8, 1), (2, 4096, 8, 1), (4, 4096, 16, 1), (4, 512, 2, 1), (2, 2048, 8, 1),
    )
)  # fmt: skip
FEW_ROWS_CANDIDATES: Final = tuple(
    FewRowsChoice(*tile, split_k)
    for tile in ((64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 4), (128, 128, 8, 4), (32, 128, 4, 5))
    for split_k in (1, 2, 4)
)

NUM_PROCESSORS: Final = 132


ONE_ROW_MEASURED: Final[dict[Shape, GemvChoice]] = {
    (6144, 4096, False): GemvChoice(16, 512, 8, 1),
    (4096, 4096, False): GemvChoice(2, 2048, 4, 1),
    (12288, 4096, True): GemvChoice(2, 4096, 4, 1),
    (4096, 12288, False): GemvChoice(8, 1024, 8, 1),
}
"""On an H200."""


def one_row_choice(num_outputs: int, num_inputs: int, gated: bool) -> GemvChoice:
    """What was measured, or by the outputs (of one half, where gated)."""
    measured = ONE_ROW_MEASURED.get((num_outputs, num_inputs, gated))
    return measured or GemvChoice(2 if num_outputs <= 8192 or gated else 4, 1024, 4, 1)


def few_rows_choice(num_outputs: int, num_inputs: int) -> FewRowsChoice:
    """Enough programs for all multiprocessors, by splitting the inputs where there are few outputs."""
    tiles = -(-num_outputs // 64)
    split_k = 1
    while tiles * split_k < NUM_PROCESSORS and split_k < 4 and num_inputs >= 1024 * split_k:
        split_k *= 2
    return FewRowsChoice(64, 128, 4, 4, split_k)
