"""`UploadRing`: the arrays of a step, packed into one copy to the device; `on_device`: one of them by itself. Knows
nothing about what they mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.platforms.direct import Reached
from pagemill.platforms.interface import Mark, Transfers

DEPTH = 4
"""Steps whose uploads may be unread; more than are ever in flight."""
_ALIGNMENT = 4
"""Elements to whose multiple each array is padded, so that kernels may read 16 bytes at once."""


@dataclass(slots=True)
class _Entry:
    host: Tensor
    staged: npt.NDArray[np.int32]
    """The same memory."""
    device: Tensor
    mark: Mark


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor there; on the host, the same memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)


class UploadRing:
    """Staging buffers, taken in turn: one is written again when the work that reads its copy is done.

    `capacity`: int32 elements that a step usually needs; a larger one makes the buffer grow.
    """

    def __init__(self, transfers: Transfers, device: torch.device, capacity: int) -> None:
        self._transfers = transfers
        self._device = device
        self._entries = [self._make(capacity) for _ in range(DEPTH)]
        self._turn = 0
        self.num_uploads = 0
        """So far; a steady step adds none."""

    def send(self, arrays: Sequence[npt.NDArray[np.int32]]) -> list[Tensor]:
        """int32 arrays -> the same on the device, for work that is queued before `uploads_consumed`."""
        self._turn = (self._turn + 1) % DEPTH
        entry = self._entries[self._turn]
        entry.mark.wait()
        starts = []
        total = 0
        for array in arrays:
            starts.append(total)
            total += -(-array.size // _ALIGNMENT) * _ALIGNMENT
        if total > len(entry.staged):
            entry = self._entries[self._turn] = self._make(2 * total)
        staged = entry.staged
        for start, array in zip(starts, arrays, strict=True):
            staged[start : start + array.size] = array.reshape(-1)
        target = entry.device[:total]
        self._transfers.upload(target, entry.host[:total])
        self.num_uploads += 1
        if len(arrays) == 1 and arrays[0].shape == (total,):
            return [target]
        return [
            entry.device[start : start + array.size].view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def uploads_consumed(self) -> None:
        """All work that reads what `send` returned last is queued."""
        self._entries[self._turn].mark = self._transfers.mark()

    def _make(self, capacity: int) -> _Entry:
        host = self._transfers.host_buffer((capacity,), "int32")
        device = torch.empty(capacity, dtype=torch.int32, device=self._device)
        # The memory may have been another's, whose work is still queued; uploads do not wait for that.
        self._transfers.finish()
        return _Entry(host, host.numpy(), device, Reached())
