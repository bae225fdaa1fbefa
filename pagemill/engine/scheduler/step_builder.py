"""`StepBuilder`: accumulates one step. Knows nothing about who should be in it."""

import numpy as np

from pagemill.engine.scheduler.limits import IntArray
from pagemill.messages.step import KnownTokens, NewRequest, SchedulerOutput, SlotBlocks


class StepBuilder:
    """What a step holds so far, and how much of the token budget is left."""

    def __init__(self, step_id: int, token_budget: int) -> None:
        self.budget_left = token_budget
        self._step_id = step_id
        self._slots: IntArray = np.zeros(0, np.int64)
        self._num_tokens: IntArray = np.zeros(0, np.int64)
        self._new: list[NewRequest] = []
        self._new_tokens: list[int] = []
        self._grown: list[SlotBlocks] = []

    def run(self, slots: IntArray, num_tokens: IntArray, grown: list[SlotBlocks]) -> None:
        """The requests that were running before this step: [R] slots and tokens for each."""
        self._slots = slots
        self._num_tokens = num_tokens
        self._grown = grown
        self.budget_left -= int(num_tokens.sum())

    def admit(self, new: NewRequest, num_tokens: int) -> None:
        """A request that starts to run, or starts again."""
        self._new.append(new)
        self._new_tokens.append(num_tokens)
        self.budget_left -= num_tokens

    @property
    def num_admitted_tokens(self) -> int:
        """Tokens of the requests that start in this step."""
        return sum(self._new_tokens)

    def arrays(self) -> tuple[IntArray, IntArray]:
        """[R] slots in batch order and [R] tokens for each; those admitted come last."""
        if not self._new:
            return self._slots, self._num_tokens
        slots = np.append(self._slots, [new.slot for new in self._new])
        return slots, np.append(self._num_tokens, self._new_tokens)

    def finish(
        self, slots: IntArray, num_tokens: IntArray, released: list[int], known: list[KnownTokens]
    ) -> SchedulerOutput:
        """The message for the workers, from the result of `arrays`."""
        return SchedulerOutput(
            self._step_id,
            slots.astype(np.int32),
            num_tokens.astype(np.int32),
            self._new,
            self._grown,
            released,
            known,
        )
