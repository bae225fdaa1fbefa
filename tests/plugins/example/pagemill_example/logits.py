"""A logits processor of one's own: tokens with odd ids are never sampled."""

import torch
from torch import Tensor

from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.processors.interface import LogitsProcessor


class OnlyEvenTokens(LogitsProcessor):
    """Concerns every request."""

    def add(self, new: NewRequest) -> bool:
        return True

    def remove(self, slot: int) -> None:
        """It keeps nothing."""

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        logits[:, 1::2] = -torch.inf
