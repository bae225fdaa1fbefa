"""`DecodeRows`: what the rows of a decode batch on the device are, as the host knows; tells what must be sent.

Knows no tensors.
"""

import numpy as np
import numpy.typing as npt

from pagemill.messages.step import Int32Array
from pagemill.worker.batch.device_states import known_tokens
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.batch.request_states import RequestStates


class DecodeRows:
    """A decode batch follows the one before when each row goes on with the same request, one position later: then the
    device knows all of it."""

    def __init__(self, states: RequestStates, pad_slot: int) -> None:
        self._states = states
        self._pad_slot = pad_slot
        self._num_rows = 0
        self._slots: Int32Array = np.zeros(0, np.int32)
        self._next: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def forget(self) -> None:
        """The rows on the device are no longer those of the last decode batch, or a slot's request is another."""
        self._num_rows = 0

    def changes(self, batch: InputBatch, num_rows: int) -> list[Int32Array]:
        """What to send before a decode batch that is padded to `num_rows`: nothing, or slots and positions of the rows,
        and slots and tokens of those whose next token the host has. The batch counts as run."""
        slots = batch.slots
        positions = batch.positions
        follows = (
            num_rows == self._num_rows and np.array_equal(slots, self._slots) and np.array_equal(positions, self._next)
        )
        self._slots = slots
        self._next = positions + 1
        self._num_rows = num_rows
        if follows:
            return []
        padding = num_rows - len(slots)
        known = known_tokens(self._states, slots)
        return [
            np.append(slots, np.full(padding, self._pad_slot, np.int32)),
            np.append(positions, np.zeros(padding, np.int64)).astype(np.int32),
            slots[known],
            batch.token_ids[known].astype(np.int32),
        ]
