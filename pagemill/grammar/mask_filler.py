"""`MaskFiller`: the masks of several outputs in one call. Knows no library."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagemill.grammar.interface import BatchFill, TokenMatcher, fill_each


class MaskFiller:
    """Used by one thread at a time, for matchers of one backend."""

    def __init__(self, *, parallel: bool = True) -> None:
        """`parallel`: whether there are cores with nothing to do."""
        self._parallel = parallel
        self._batch: BatchFill | None = None

    def fill(self, matchers: Sequence[TokenMatcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
        """[K] matchers, and their masks [K, ceil(V / 32)] as `TokenMatcher.fill` makes them. Returns why there is none,
        for each output that cannot be followed any further within the limits: its mask says nothing."""
        if len(matchers) < 2:
            return fill_each(matchers, masks)
        if not masks.flags.c_contiguous or len(masks) != len(matchers):
            raise ValueError(f"masks of shape {masks.shape} for {len(matchers)} outputs; they must be contiguous rows")
        if self._batch is None:
            self._batch = matchers[0].batch(self._parallel)
        return self._batch(matchers, masks)
