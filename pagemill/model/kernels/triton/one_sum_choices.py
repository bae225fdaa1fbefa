"""Tiles of one_sum.py, by shape and number of rows. They change no bits, only times.

Data and rules; `benchmarks/gpu_deterministic.py` prints what they are made from.
"""

from dataclasses import dataclass
from typing import Final

from pagemill.model.kernels.triton.choices import Shape

MOST_FEW: Final = 128
"""Rows that are multiplied all at once."""
MOST_EARLY: Final = 16
"""Of those, rows that one_sum_early.py takes on Hopper GPUs."""


@dataclass(frozen=True, slots=True)
class FewTiles:
    """Of up to MOST_FEW rows, all in one program."""

    outputs: int
    """Of each half, where gated."""
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class EarlyTiles:
    """Of up to MOST_EARLY rows."""

    warps: int
    """1 to 3, of 16 outputs each."""
    inputs: int
    """Of a turn."""
    stages: int
    """Turns in the ring."""


@dataclass(frozen=True, slots=True)
class ManyTiles:
    """Tiles of a product of more rows than one program takes."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    cost: int
    """Time of one tile on each multiprocessor, in whatever unit all have."""


_WIDE: Final = 65_536
"""Outputs of which programs come in many turns, so that two are better resident at once."""
_RESIDENT: Final = 80
"""Programs up to which each has a multiprocessor's memory for itself; of more, two share it."""
_PLAIN: Final = {
    16: FewTiles(64, 128, 4, 9), 32: FewTiles(64, 128, 4, 6), 64: FewTiles(64, 128, 4, 6), 128: FewTiles(64, 128, 4, 4),
}  # fmt: skip
_PLAIN_WIDE: Final = {
    16: FewTiles(64, 128, 4, 4), 32: FewTiles(64, 128, 4, 4), 64: FewTiles(128, 64, 8, 6), 128: FewTiles(128, 64, 8, 5),
}  # fmt: skip
_GATED: Final = {
    16: FewTiles(64, 128, 4, 5), 32: FewTiles(64, 128, 4, 4), 64: FewTiles(64, 128, 4, 4), 128: FewTiles(64, 64, 4, 6),
}  # fmt: skip
_RING: Final = 210 << 10
"""Bytes of shared memory: one program on each multiprocessor. Were there room for two, the first to be free would take
two of the next kernel's, and others none."""
MANY: Final = (ManyTiles(64, 128, 128, 4, 4, 18), ManyTiles(128, 128, 64, 4, 4, 28), ManyTiles(128, 256, 64, 8, 4, 47))


def few_class(num_rows: int) -> int:
    """Rows of the tile that holds up to MOST_FEW rows."""
    return next(rows for rows in _PLAIN if num_rows <= rows)


def few_tiles(num_rows: int, shape: Shape) -> FewTiles:
    """For 1 to MOST_FEW rows."""
    rows = few_class(num_rows)
    if shape[2]:
        return _GATED[rows]
    if rows == 16 and _RESIDENT * 64 < shape[0] < _WIDE:
        return FewTiles(64, 128, 4, 5)
    return _PLAIN_WIDE[rows] if shape[0] >= _WIDE else _PLAIN[rows]


def early_class(num_rows: int) -> int:
    """Rows of the tile that holds up to MOST_EARLY rows."""
    return 8 if num_rows <= 8 else 16


def early_tiles(num_rows: int, shape: Shape, num_processors: int) -> EarlyTiles:
    """For 1 to MOST_EARLY rows: the warps with which a multiprocessor has the fewest outputs, rather many."""
    outputs, size, gated = shape

    def most_groups(warps: int) -> int:
        return -(-outputs // (16 * warps * num_processors)) * warps

    warps = min((3, 2, 1), key=most_groups)
    groups = warps * (2 if gated else 1)
    inputs = 256 if groups <= 3 else 128
    stage = (16 * groups + early_class(num_rows)) * inputs * 2
    turns = -(-size // inputs) * (most_groups(warps) // warps)
    return EarlyTiles(warps, inputs, min(_RING // stage, turns))


def many_tiles(num_rows: int, num_outputs: int, num_processors: int, itemsize: int) -> ManyTiles:
    """Those that take the least time; `itemsize`: bytes of an element of the result, which shared memory must hold."""
    allowed = [tiles for tiles in MANY if itemsize == 2 or tiles.outputs <= 128]

    def cost(tiles: ManyTiles) -> int:
        count = -(-num_rows // tiles.rows) * -(-num_outputs // tiles.outputs)
        return -(-count // num_processors) * tiles.cost

    return min(allowed, key=cost)
