"""`RowMasks`: which tokens the rows of a step may sample. Knows nothing about why."""

from dataclasses import dataclass
from typing import Final

from pagemill.messages.step import Int32Array

ANY_TOKEN: Final = -1
LEFT: Final = -2


@dataclass(frozen=True, slots=True)
class RowMasks:
    """M masks for R rows."""

    words: Int32Array
    """[M, ceil(V / 32)] a bit for each token that may come: token t is bit t % 32 of word t // 32."""
    rows: Int32Array
    """[R] the mask of each row; ANY_TOKEN where there is none, LEFT where others sample the row."""
