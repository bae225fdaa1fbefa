"""`LinkedStage`: hidden states go from stage to stage, sampled tokens from the last stage back to the first.

The scheduler does not know of stages: it may schedule a step whose tokens are still being sampled by the one before.
So tokens travel between the workers: the last stage sends those of each step to the first, which waits for them only
when a step needs them. Steps that share no request overlap on the stages. Stages between need no tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagemill.errors import DistributedError
from pagemill.log import get_logger
from pagemill.messages.step import Int32Array
from pagemill.model.distributed.group import Group, Transfer
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.pipeline.stage import Stage

logger = get_logger(__name__)

MAX_EXPECTED = 64
"""Steps whose tokens may be on their way unread; more than any engine keeps in flight."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens of one step on their way."""

    transfer: Transfer
    token_ids: Tensor
    """[L] int32, once the transfer is done."""
    slots: Int32Array
    positions: Int32Array
    """[L] where in each slot's request the token goes."""
    generation: Int32Array
    """[L] that of the slots when the tokens were expected (`RequestStates.generation`)."""


class LinkedStage(Stage):
    """Stage `group.rank` of `group.size`. `hidden_size`, `dtype` and `device` are those of the hidden states.

    At most one send of each kind is under way: the next one waits until the one before was received.
    """

    def __init__(
        self, group: Group, states: RequestStates, *, hidden_size: int, dtype: torch.dtype, device: str
    ) -> None:
        self._group = group
        self._states = states
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._is_first = group.rank == 0
        self.samples = group.rank == group.size - 1
        self._hidden_sent: Transfer | None = None
        self._tokens_sent: Transfer | None = None
        self._expected: deque[Expected] = deque()
        self._num_expected = np.zeros(len(states.num_tokens), np.int32)
        """[S] tokens on their way to each slot that are not void."""

    def restart(self, slot: int) -> None:
        self._num_expected[slot] = 0

    def settle(self, slots: Int32Array) -> None:
        while self._num_expected[slots].any():
            self._take_oldest()

    def receive(self, batch: InputBatch, num_beside: int = 0) -> Tensor:
        if self._is_first:
            return torch.from_numpy(batch.token_ids)
        beside = (1 + num_beside,) if num_beside else ()
        shape = (*beside, batch.num_tokens, self._hidden_size)
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._group.recv(hidden, self._group.rank - 1)

    def pass_on(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        if self.samples:
            return hidden[torch.from_numpy(batch.logits_index)]
        if self._hidden_sent is not None:
            self._hidden_sent.wait()
        self._hidden_sent = self._group.isend(hidden, self._group.rank + 1)
        return hidden[:0]

    def sampled(self, token_ids: Int32Array) -> None:
        if self._tokens_sent is not None:
            self._tokens_sent.wait()
        self._tokens_sent = self._group.isend(torch.from_numpy(token_ids), 0)

    def expect(self, batch: InputBatch) -> None:
        slots = batch.sampled_slots
        positions = self._states.expect(slots)
        if not self._is_first:
            return
        token_ids = torch.empty(len(slots), dtype=torch.int32)
        transfer = self._group.irecv(token_ids, self._group.size - 1)
        self._expected.append(Expected(transfer, token_ids, slots, positions, self._states.generation[slots]))
        self._num_expected[slots] += 1
        if len(self._expected) > MAX_EXPECTED:
            self._take_oldest()

    def shared(self, values: Int32Array) -> Int32Array:
        found: Int32Array = self._group.broadcast(torch.from_numpy(values), self._group.size - 1).numpy()
        return found

    def told(self, values: Sequence[int]) -> tuple[int, ...]:
        count = int(self.shared(np.array([len(values)], np.int32))[0])
        own = np.array(values if self.samples else [0] * count, np.int32)
        return tuple(self.shared(own).tolist()) if count else ()

    def close(self) -> None:
        """A connection that is closed takes with it what was sent but not yet received: the other stages would wait."""
        sent = [transfer for transfer in (self._hidden_sent, self._tokens_sent) if transfer is not None]
        self._hidden_sent = self._tokens_sent = None
        try:
            for transfer in (*sent, *(expected.transfer for expected in self._expected)):
                transfer.wait()
        except DistributedError as error:
            logger.debug("closing stage %d: %s", self._group.rank, error)
        self._expected.clear()

    def _take_oldest(self) -> None:
        oldest = self._expected.popleft()
        oldest.transfer.wait()
        here = self._states.generation[oldest.slots] == oldest.generation
        slots = oldest.slots[here]
        self._states.fill(slots, oldest.positions[here], oldest.token_ids.numpy()[here])
        self._num_expected[slots] -= 1
