"""logit_bias: a number for each of some tokens, which is added to its logit."""

import torch
from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.processors.interface import LogitsProcessor


class LogitBiasProcessor(LogitsProcessor):
    """Keeps token ids and numbers of the slots that have some, where the logits are."""

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, new: NewRequest) -> bool:
        self.remove(new.slot)
        bias = new.params.logit_bias if isinstance(new.params, SamplingParams) else None
        if not bias:
            return False
        ids, values = torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)
        device = self.context.device
        self._biases[new.slot] = ids.to(device, non_blocking=True), values.to(device, non_blocking=True)
        return True

    def remove(self, slot: int) -> None:
        self._biases.pop(slot, None)

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        for row, slot in enumerate(rows.slots.tolist()):
            logits[row].index_add_(0, *self._biases[slot])
