"""`Upload`: tensors of mapped files to a GPU, through pinned buffers. Knows no format.

A copy from pageable memory reads and sends by turns, on one thread. Here several threads read the next piece of a
tensor into a pinned buffer while the one before is sent.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pagemill.utils.cpu_affinity import current_cpus

PIECE_BYTES = 16 << 20
"""Of a buffer: large enough that sending one takes longer than telling to, small enough to be pinned in no time."""
NUM_BUFFERS = 4
MAX_THREADS = 8
SMALL_BYTES = 1 << 20
"""A tensor of no more is sent as it is."""


class _Buffer:
    """Pinned memory, and when what it held has been sent."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.sent.record(torch.cuda.current_stream(device))


class Upload:
    """A context manager; buffers are made for the first tensor that needs them."""

    def __init__(self, device: torch.device) -> None:
        """`device`: a GPU."""
        self._device = device
        self._threads = max(1, min(MAX_THREADS, len(current_cpus()) or os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(self._threads, "upload")
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def __call__(self, tensor: Tensor) -> Tensor:
        """The same on the device, which may still be under way on its current stream."""
        row_bytes = tensor.nbytes // len(tensor) if tensor.dim() and len(tensor) else 0
        if tensor.is_cuda or tensor.nbytes <= SMALL_BYTES or row_bytes > PIECE_BYTES or tensor.stride(-1) != 1:
            return tensor.to(self._device)
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        for rows in pieces(len(tensor), PIECE_BYTES // row_bytes):
            part = tensor[rows]
            buffer = self._next()
            staged = buffer.memory[: part.nbytes].view(part.dtype).view(part.shape)
            self._read(part, staged)
            made[rows].copy_(staged, non_blocking=True)
            buffer.sent.record(torch.cuda.current_stream(self._device))
        return made

    def _next(self) -> _Buffer:
        """A buffer whose bytes have been sent."""
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.append(_Buffer(self._device))
        buffer = self._buffers[self._turn % len(self._buffers)]
        self._turn += 1
        buffer.sent.synchronize()
        return buffer

    def _read(self, part: Tensor, staged: Tensor) -> None:
        # By numpy: torch would start threads of its own in each of these.
        source = part.view(torch.uint8).numpy()
        target = staged.view(torch.uint8).numpy()
        shares = pieces(len(part), -(-len(part) // self._threads))
        for done in [self._pool.submit(np.copyto, target[rows], source[rows]) for rows in shares]:
            done.result()


def pieces(count: int, at_once: int) -> Iterator[slice]:
    """`count` rows, `at_once` at a time."""
    for begin in range(0, count, at_once):
        yield slice(begin, min(begin + at_once, count))
