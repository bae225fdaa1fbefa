"""repetition_penalty, frequency_penalty and presence_penalty: tokens that occurred become less likely.

The first looks at prompt and output, and divides positive logits and multiplies negative ones; the others look at the
output, and subtract: once for each occurrence, and once for any.
"""

import numpy as np
import torch
from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.processors.interface import LogitsProcessor
from pagemill.worker.sampling.uploads import LatestUpload


class PenaltiesProcessor(LogitsProcessor):
    """Keeps the three numbers of each slot where the logits are."""

    reads_tokens = True

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        num_slots = len(context.states.num_tokens)
        self._values = torch.zeros(num_slots, 3, device=context.device)
        """[S, 3] repetition, frequency, presence."""
        self._repeats, self._counts = np.zeros(num_slots, bool), np.zeros(num_slots, bool)
        """[S] whether a slot asks for the first; for one of the others."""
        self._slots = LatestUpload(context.device)

    def add(self, new: NewRequest) -> bool:
        params = new.params
        slot = new.slot
        if not isinstance(params, SamplingParams):
            return False
        self._repeats[slot] = params.repetition_penalty != 1
        self._counts[slot] = params.frequency_penalty != 0 or params.presence_penalty != 0
        if not self._repeats[slot] and not self._counts[slot]:
            return False
        values = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._values[slot].copy_(torch.tensor(values), non_blocking=True)
        return True

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        history = self.context.history
        values = self._values.index_select(0, self._slots.of(rows.slots.astype(np.int64)))
        repetition, frequency, presence = values.unsqueeze(2).unbind(1)
        if self._repeats[rows.slots].any():
            changed = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits.copy_(torch.where(history.seen(rows), changed, logits))
        if self._counts[rows.slots].any():
            counts = history.output_counts(rows)
            logits.sub_(counts * frequency).sub_((counts > 0) * presence)
