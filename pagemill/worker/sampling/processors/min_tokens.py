"""min_tokens: stop tokens cannot be sampled before a request has generated that many tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.processors.interface import LogitsProcessor


class MinTokensProcessor(LogitsProcessor):
    """Keeps, for slots that ask for it, the position from which stopping is allowed, and the stop token ids."""

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        self._allowed_from: dict[int, int] = {}
        self._stop_ids: dict[int, Tensor] = {}
        self._done: list[int] = []

    def add(self, new: NewRequest) -> bool:
        self.remove(new.slot)
        params = new.params
        if not isinstance(params, SamplingParams):
            return False
        stop_ids = params.stop_token_ids or ()
        allowed_from = new.num_prompt_tokens + params.min_tokens
        if not stop_ids or len(new.token_ids) >= allowed_from:
            return False
        self._allowed_from[new.slot] = allowed_from
        self._stop_ids[new.slot] = torch.tensor(stop_ids).to(self.context.device, non_blocking=True)
        return True

    def remove(self, slot: int) -> None:
        self._allowed_from.pop(slot, None)
        self._stop_ids.pop(slot, None)

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        for row, slot in enumerate(rows.slots.tolist()):
            allowed_from, position = self._allowed_from[slot], rows.positions[row]
            if position < allowed_from:
                logits[row].index_fill_(0, self._stop_ids[slot], -torch.inf)
            if position + 1 >= allowed_from:  # this was the last token that must not end the output
                self.remove(slot)
                self._done.append(slot)

    def take_done(self) -> Sequence[int]:
        done, self._done = self._done, []
        return done
