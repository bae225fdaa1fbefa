"""Structured output: tokens that a request's grammar does not allow cannot be sampled."""

from typing import cast

import numpy as np
from torch import Tensor

from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.row_masks import ANY_TOKEN, RowMasks
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.grammar_masks import MasksOfWorker
from pagemill.worker.sampling.processors.interface import MaskingProcessor


class GrammarProcessor(MaskingProcessor):
    """Applies what the engine says to each step; the state of a grammar is there."""

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        found = context.extensions.get("grammar_masks")
        self._masks = None if found is None else cast(MasksOfWorker, found)

    def add(self, new: NewRequest) -> bool:
        return self._masks is not None and self._masks.take_begun(new.slot)

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        if self._masks is not None:
            self._masks.refuse(logits, rows)

    def masks(self, rows: SampledRows) -> RowMasks:
        if self._masks is None:
            return RowMasks(np.zeros((0, 0), np.int32), np.full(len(rows), ANY_TOKEN, np.int32))
        return self._masks.masks(rows)
