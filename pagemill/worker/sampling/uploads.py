"""`LatestUpload`: an array of the host on the device, sent again only when it is another one than the last."""

import numpy as np
import torch
from torch import Tensor

from pagemill.worker.batch.input_batch import Int64Array


class LatestUpload:
    """Steps of the same rows, one after the other, send nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._array: Int64Array = np.zeros(0, np.int64)
        self._sent = torch.zeros(0, dtype=torch.int64, device=device)

    def of(self, array: Int64Array) -> Tensor:
        """[N] int64 -> the same on the device; not to be written."""
        if not np.array_equal(array, self._array):
            self._array = array.copy()
            self._sent = torch.from_numpy(self._array).to(self._device, non_blocking=True)
        return self._sent
