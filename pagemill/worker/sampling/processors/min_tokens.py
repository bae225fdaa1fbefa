"""min_tokens: stop tokens cannot be sampled before a request has generated that many tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.sampling.processors.interface import LogitsProcessor


class MinTokensProcessor(LogitsProcessor):
    """Keeps, for slots that ask for it, the position from which stopping is allowed, and the stop token ids."""

    def __init__(self) -> None:
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
        self._stop_ids[new.slot] = torch.tensor(stop_ids, dtype=torch.int64)
        return True

    def remove(self, slot: int) -> None:
        self._allowed_from.pop(slot, None)
        self._stop_ids.pop(slot, None)

    def apply(self, logits: Tensor, batch: InputBatch) -> None:
        if not self._allowed_from:
            return
        for row, slot in enumerate(batch.sampled_slots.tolist()):
            allowed_from = self._allowed_from.get(slot)
            if allowed_from is None:
                continue
            position = batch.sampled_positions[row]
            if position < allowed_from:
                logits[row, self._stop_ids[slot]] = -torch.inf
            if position + 1 >= allowed_from:  # this was the last token that must not end the output
                self.remove(slot)
                self._done.append(slot)

    def take_done(self) -> Sequence[int]:
        done, self._done = self._done, []
        return done
