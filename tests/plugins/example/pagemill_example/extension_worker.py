"""The workers' half of the example's step extension, and the logits processor that does what it says."""

import torch
from torch import Tensor

from pagemill.messages.pending import Ready
from pagemill.messages.step import Int32Array, NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.extensions.interface import WorkerExtension
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.processors.interface import LogitsProcessor
from pagemill_example.extension import Changed, Remainders


class Rule(WorkerExtension):
    """Keeps what the engine decided, by slot."""

    def __init__(self, context: object) -> None:
        self.remainders: dict[int, int] = {}
        self.num_rows = 0

    def begin(self, payload: Remainders) -> None:
        self.remainders.update(zip(payload.slots, payload.remainders, strict=True))

    def answer(self, slots: Int32Array) -> Ready[Changed] | None:
        count, self.num_rows = self.num_rows, 0
        return Ready(Changed(count)) if count else None


class ByRule(LogitsProcessor):
    """Concerns every request that the engine decided about."""

    def __init__(self, context: SamplerContext) -> None:
        rule = context.extensions["example"]
        if not isinstance(rule, Rule):
            raise TypeError(f"the example's extension is {rule}")
        self._rule = rule

    def add(self, new: NewRequest) -> bool:
        return new.slot in self._rule.remainders

    def remove(self, slot: int) -> None:
        self._rule.remainders.pop(slot, None)

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        self._rule.num_rows += len(rows)
        for row, slot in zip(logits, rows.slots.tolist(), strict=True):
            row[2 - self._rule.remainders[slot] :: 4] = -torch.inf
