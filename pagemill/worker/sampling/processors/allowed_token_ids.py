"""allowed_token_ids: no other token is sampled."""

import torch
from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.processors.interface import LogitsProcessor


class AllowedTokensProcessor(LogitsProcessor):
    """Keeps the token ids of the slots that are restricted, each id once, where the logits are."""

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        self._allowed: dict[int, Tensor] = {}

    def add(self, new: NewRequest) -> bool:
        self.remove(new.slot)
        allowed = new.params.allowed_token_ids if isinstance(new.params, SamplingParams) else None
        if not allowed:
            return False
        ids = torch.tensor(sorted(set(allowed)))
        self._allowed[new.slot] = ids.to(self.context.device, non_blocking=True)
        return True

    def remove(self, slot: int) -> None:
        self._allowed.pop(slot, None)

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        for row, slot in enumerate(rows.slots.tolist()):
            allowed = self._allowed[slot]
            kept = logits[row].index_select(0, allowed)
            logits[row].fill_(-torch.inf).index_copy_(0, allowed, kept)
