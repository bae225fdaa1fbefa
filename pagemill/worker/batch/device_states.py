"""What the device keeps of each slot: the last token, and how to sample. Knows no requests, only slots."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.messages.step import Int32Array
from pagemill.worker.batch.request_states import RequestStates

NUM_COLUMNS = 7
RESULT_TURNS = 4
"""Steps whose tokens may be unread; more than are ever in flight."""


class DeviceStates:
    """Arrays by slot, with one slot more than there are, for requests that only fill up a batch."""

    def __init__(self, num_slots: int, max_rows: int, device: torch.device) -> None:
        self.pad_slot = num_slots
        self.last_tokens: Tensor = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """[S + 1] the token that a slot's next step computes, where that is one that was sampled."""
        self.results: Tensor = torch.zeros((RESULT_TURNS, max_rows), dtype=torch.int32, device=device)
        """[turns, R] sampled tokens of the latest steps, each step's in the next row."""
        self.turn: Tensor = torch.zeros(1, dtype=torch.int64, device=device)
        """[1] row of `results` that the next step writes."""
        self.sampling: Tensor = torch.zeros((num_slots + 1, NUM_COLUMNS), dtype=torch.int32, device=device)
        """[S + 1, columns] bits of: temperature, top_p, min_p (float32), top_k, greedy, seed (low, high)."""
        columns = SamplingColumns(self.sampling)
        for column in (columns.temperature, columns.top_p, columns.greedy):
            column.fill_(1)

    @staticmethod
    def sampling_rows(states: RequestStates, slots: Int32Array) -> Int32Array:
        """[N, columns] the rows of `sampling` for these slots."""
        rows = np.empty((len(slots), NUM_COLUMNS), np.int32)
        for column, values in enumerate((states.temperature, states.top_p, states.min_p)):
            rows[:, column] = values[slots].view(np.int32)
        rows[:, 3] = states.top_k[slots]
        rows[:, 4] = states.greedy[slots]
        rows[:, 5:] = states.seed[slots].view(np.int32).reshape(-1, 2)
        return rows


class SamplingColumns:
    """Rows of `DeviceStates.sampling`, by name. R rows; all are views."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.temperature = rows[:, 0].view(torch.float32)
        self.top_p = rows[:, 1].view(torch.float32)
        self.min_p = rows[:, 2].view(torch.float32)
        self.top_k = rows[:, 3]
        self.greedy = rows[:, 4]
        self.seed_low = rows[:, 5]
        """[R] int32 whose bits are the low half of the seed."""
        self.seed_high = rows[:, 6]


def known_tokens(states: RequestStates, slots: Int32Array) -> npt.NDArray[np.bool_]:
    """[R] whether the host knows all tokens of a slot: none was sampled since its request came."""
    known: npt.NDArray[np.bool_] = states.num_sampled[slots] == 0
    return known
