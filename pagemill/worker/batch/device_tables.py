"""Block tables that live on the device too: what changes is noted, and sent with the next step.

Knows nothing about when a step is sent, nor why blocks are added.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.worker.batch.block_tables import BlockTable

Int32Array = npt.NDArray[np.int32]


class DeviceBlockTable(BlockTable):
    """A table with a copy on the device, of one row more: row `num_slots` belongs to requests that only fill up a
    batch, and is all null blocks.

    Entries of a row beyond a request's blocks may be those of a former request: nobody reads them.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        super().__init__(num_slots, max_model_len, block_size)
        self.device_blocks: Tensor = torch.zeros(
            (num_slots + 1, self.blocks.shape[1]), dtype=torch.int32, device=device
        )
        """[S + 1, blocks]."""
        self._places: list[int] = []
        self._values: list[int] = []
        self._may_repeat = False
        """Whether a place may be among them twice."""

    def reset(self, slot: int, block_ids: Sequence[int]) -> None:
        self._may_repeat = True
        super().reset(slot, block_ids)

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        start = int(self.num_blocks[slot])
        width = self.blocks.shape[1]
        super().append(slot, block_ids)
        first = slot * width + start
        self._places += range(first, first + len(block_ids))
        self._values += block_ids

    def take_changes(self) -> tuple[Int32Array, Int32Array] | None:
        """Places in the flat table, and the block ids that belong there, since the last call; None for no change.

        A place that was written twice has its last value only.
        """
        if not self._places:
            return None
        places = np.array(self._places, np.int32)
        values = np.array(self._values, np.int32)
        self._places, self._values = [], []
        if not self._may_repeat:
            return places, values
        self._may_repeat = False
        # Of equal places the device would keep any; np.unique keeps the first, so look from the end.
        kept, last = np.unique(places[::-1], return_index=True)
        if len(kept) < len(places):
            places = kept
            values = values[::-1][last]
        return places, values
