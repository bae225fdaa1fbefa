"""allowed_token_ids: no other token is sampled."""

import torch
from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.processors.per_slot import PerSlotProcessor


class AllowedTokensProcessor(PerSlotProcessor[Tensor]):
    """Keeps the token ids of the slots that are restricted, each id once, where the logits are."""

    def state_of(self, new: NewRequest, params: SamplingParams) -> Tensor | None:
        allowed = params.allowed_token_ids
        return self.sent(torch.tensor(sorted(set(allowed)))) if allowed else None

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        for row, slot in enumerate(rows.slots.tolist()):
            allowed = self.states[slot]
            kept = logits[row].index_select(0, allowed)
            logits[row].fill_(-torch.inf).index_copy_(0, allowed, kept)
