"""`SteadyBatch`: requests that all decode, of which nothing is due for some steps but one token more. Such a step is
the one before once more: no blocks, no full blocks, no ends but by a stop id.

Why: between two steps of a model everything that Python touches has left the caches, so that for a few requests the
work of scheduling is the memory that it reads. Knows nothing about queues and budgets.
"""

from collections.abc import Mapping

import numpy as np

from pagemill.engine.scheduler.limits import IntArray
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.messages.step import Int32Array


class SteadyBatch:
    """Made when a step of [R] `slots` was scheduled, one token and one sample each. Holds until one is released.

    Everything that it does to the states is what the scheduler does, for slots that nothing else is due for.
    """

    def __init__(self, states: SlotStates, slots: IntArray, num_steps: int) -> None:
        """`num_steps` of them may be scheduled: see `of`."""
        self._steps_left = num_steps
        self._states = states
        self._index = _as_index(slots)
        self._stop_ids = states.stop_ids[slots]
        self.slots = slots
        self.epochs = states.epoch[slots]
        self.slots32: Int32Array = slots.astype(np.int32)
        self.ones: Int32Array = np.ones(len(slots), np.int32)
        self.request_ids: list[str] = states.request_ids[slots].tolist()
        """Read only: outputs share it."""

    @classmethod
    def of(cls, states: SlotStates, slots: IntArray) -> "SteadyBatch | None":
        """None when something is due at the next step already, as there is at most steps of many requests."""
        computed = states.num_computed[slots]
        # Up to the end of what is allocated, not to the end of a block, and not to the token before the last.
        num_steps = int((states.next_commit[slots] - computed).min()) - 1
        for ends in (states.capacity[slots], states.length_limit[slots] - 2):
            if num_steps < 1:
                return None
            num_steps = min(num_steps, int((ends - computed).min()))
        if num_steps < 1 or _any_in(states.many_stop_ids, slots):
            return None
        return cls(states, slots, num_steps)

    @property
    def goes_on(self) -> bool:
        """Whether there is another such step."""
        return self._steps_left > 0

    def schedule(self) -> None:
        """One more token of each, and one to be sampled."""
        self._steps_left -= 1
        self._states.num_computed[self._index] += 1
        self._states.num_expected[self._index] += 1

    def append(self, token_ids: Int32Array) -> bool:
        """[R] what was sampled. False, and nothing happens, when one of them is a stop id, or no token: some request
        may end."""
        if (self._stop_ids == token_ids[:, None]).any():
            return False
        self._states.append(self._index, token_ids)
        return True


def _any_in(by_slot: Mapping[int, object], slots: IntArray) -> bool:
    return bool(by_slot) and not by_slot.keys().isdisjoint(slots.tolist())


def _as_index(slots: IntArray) -> IntArray | slice:
    """A slice where the slots lie side by side, which is faster to index with."""
    first = int(slots[0])
    alike = np.array_equal(slots, np.arange(first, first + len(slots)))
    return slice(first, first + len(slots)) if alike else slots
