"""logit_bias: a number for each of some tokens, which is added to its logit."""

import torch
from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.processors.per_slot import PerSlotProcessor


class LogitBiasProcessor(PerSlotProcessor[tuple[Tensor, Tensor]]):
    """Keeps token ids and numbers of the slots that have some, where the logits are."""

    def state_of(self, new: NewRequest, params: SamplingParams) -> tuple[Tensor, Tensor] | None:
        bias = params.logit_bias
        if not bias:
            return None
        ids = torch.tensor(list(bias))
        return self.sent(ids), self.sent(torch.tensor(list(bias.values()), dtype=torch.float32))

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        for row, slot in enumerate(rows.slots.tolist()):
            logits[row].index_add_(0, *self.states[slot])
