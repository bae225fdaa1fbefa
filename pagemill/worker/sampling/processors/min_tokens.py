"""min_tokens: stop tokens cannot be sampled before a request has generated that many tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.processors.per_slot import PerSlotProcessor


class _NoStop(NamedTuple):
    """Until when a slot must not stop, and by what it does, where the logits are."""

    allowed_from: int
    """Position."""
    stop_ids: Tensor


class MinTokensProcessor(PerSlotProcessor[_NoStop]):
    """Keeps, for slots that ask for it, the position from which stopping is allowed, and the stop token ids."""

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        self._done: list[int] = []

    def state_of(self, new: NewRequest, params: SamplingParams) -> _NoStop | None:
        stop_ids = params.stop_token_ids or ()
        allowed_from = new.num_prompt_tokens + params.min_tokens
        if not stop_ids or len(new.token_ids) >= allowed_from:
            return None
        return _NoStop(allowed_from, self.sent(torch.tensor(stop_ids)))

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        before = -1
        for row, slot in enumerate(rows.slots.tolist()):
            # A slot that verifies drafts has several rows. Only the first is sure to be kept: it alone says what is
            # over, and later rows of a slot that has nothing left to do may end the output.
            first = slot != before
            before = slot
            state = self.states.get(slot)
            if state is None:
                continue
            position = rows.positions[row]
            if position < state.allowed_from:
                logits[row].index_fill_(0, state.stop_ids, -torch.inf)
            if first and position + 1 >= state.allowed_from:  # this was the last token that must not end the output
                self.remove(slot)
                self._done.append(slot)

    def take_done(self) -> Sequence[int]:
        done, self._done = self._done, []
        return done
