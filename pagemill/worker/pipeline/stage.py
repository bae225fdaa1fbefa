"""`Stage`: where a step's inputs come from, and where its hidden states and tokens go. `SoloStage`: the only one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from pagemill.messages.step import Int32Array
from pagemill.worker.batch.input_batch import InputBatch


class Stage(ABC):
    """One stage's exchange with the others. Every stage runs every step, in the same order."""

    alone: ClassVar[bool] = False
    """Whether there are no others."""
    samples: bool
    """Whether this stage has the logits; the others are told, or need not know, what was sampled."""

    @abstractmethod
    def restart(self, slot: int) -> None:
        """The host knows all tokens of a slot: what is still on its way for it is void."""

    @abstractmethod
    def settle(self, slots: Int32Array) -> None:
        """Return when all tokens of these slots are in the slots' state. Called before a batch is gathered."""

    @abstractmethod
    def receive(self, batch: InputBatch, num_beside: int = 0) -> Tensor:
        """The network's input: token ids [T], or the hidden states of the stage before [T, E]; with so many others
        beside them, [1 + num_beside, T, E]."""

    @abstractmethod
    def pass_on(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        """[T, E] to the next stage, or what it is to receive with others beside them; the rows to be sampled here
        [L, E], or none of them."""

    @abstractmethod
    def sampled(self, token_ids: Int32Array) -> None:
        """[L] tokens of the last batch, where `samples`."""

    @abstractmethod
    def expect(self, batch: InputBatch) -> None:
        """The last batch is sampled by another stage; each of its slots has one more token from now on."""

    @abstractmethod
    def shared(self, values: Int32Array) -> Int32Array:
        """[N] of the stage that samples, on all stages; elsewhere `values` are as many of any. All stages call it for
        the same step, and wait for each other."""

    @abstractmethod
    def told(self, values: Sequence[int]) -> tuple[int, ...]:
        """Those of the stage that samples, on all stages; elsewhere `values` are not read. All stages call it at the
        same time, and wait for each other."""

    @abstractmethod
    def close(self) -> None:
        """Return when nothing is on its way any more; connections may be closed then."""


class SoloStage(Stage):
    """The whole model: token ids in, rows to sample out, nothing to exchange."""

    alone = True
    samples = True

    def restart(self, slot: int) -> None:
        return

    def settle(self, slots: Int32Array) -> None:
        return

    def receive(self, batch: InputBatch, num_beside: int = 0) -> Tensor:
        return torch.from_numpy(batch.token_ids)

    def pass_on(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        if len(batch.logits_index) == len(hidden):
            return hidden  # every token is sampled after, as in all steps that only decode
        return hidden[torch.from_numpy(batch.logits_index)]

    def sampled(self, token_ids: Int32Array) -> None:
        return

    def expect(self, batch: InputBatch) -> None:
        raise RuntimeError("the only stage samples every batch itself")

    def shared(self, values: Int32Array) -> Int32Array:
        raise RuntimeError("the only stage has nobody to tell")

    def told(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def close(self) -> None:
        return
