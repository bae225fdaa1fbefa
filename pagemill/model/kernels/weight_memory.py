"""`WeightMemory`: memory for packed weights, in huge pages where the system has them. Knows no layout.

A step reads every weight once, far more than the translation caches of a CPU cover in pages of 4 KiB: with pages of
2 MiB, a decode step's layers take less time (docs/benchmarks.md).
"""

import ctypes
import math
import mmap
import sys

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
"""Mapped at once. What is not written of it costs nothing."""
ALIGNMENT_BYTES = 64


class WeightMemory:
    """Tensors side by side in large mappings, as most weights are smaller than a huge page. One thread at a time.

    A mapping goes back to the system when no tensor in it is left.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of any values, aligned to ALIGNMENT_BYTES."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._chunk):
            self._chunk = _map(max(CHUNK_BYTES, num_bytes))
            self._used = 0
        taken = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return taken.view(dtype).view(shape)


def _map(num_bytes: int) -> Tensor:
    """Bytes that begin at a huge page; the system gives them when they are first written, from the node of the thread
    that writes."""
    if sys.platform != "linux":
        return torch.empty(num_bytes, dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages
        return torch.empty(num_bytes, dtype=torch.uint8)
    ahead = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES
    return torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=ahead)
