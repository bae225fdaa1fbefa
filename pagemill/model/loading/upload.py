"""`uploaded`: tensors of mapped files to a GPU, through pinned buffers. Knows no format.

A copy from pageable memory reads and sends by turns, on one thread. Here several threads do so, each with buffers and a
stream of its own, and with some tensors ahead of the one that is wanted.
"""

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from pagemill.utils.cpu_affinity import current_cpus

PIECE_BYTES: Final = 8 << 20
"""Of a buffer: large enough that sending one takes longer than asking for it, small enough to be pinned in no time."""
AHEAD_BYTES: Final = 256 << 20
"""Of tensors on their way before the first of them is waited for."""
MAX_THREADS: Final = 4
SMALL_BYTES: Final = 1 << 20
"""A tensor of no more is sent as it is."""
_NUM_BUFFERS = 2
_POPULATE_READ = 22
"""madvise: map the pages now. Linux 5.14; before, they are mapped one fault after the other."""

Other = TypeVar("Other")


@dataclass(slots=True)
class _Upload:
    """A tensor on its way."""

    name: str
    source: Tensor
    made: Tensor
    pieces: list[Future[torch.cuda.Event]]

    def wait(self, stream: torch.cuda.Stream) -> Tensor:
        """The tensor, all of which has been read; what is enqueued on `stream` from now on finds it whole."""
        for piece in self.pieces:
            stream.wait_event(piece.result())
        return self.made


class _Lane(threading.local):
    """What a thread has for itself."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: list[Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        self._turn = 0

    def send(self, source: Tensor, target: Tensor, begins: torch.cuda.Event) -> torch.cuda.Event:
        """Read and enqueue one piece; when it will have been sent. `begins`: when the target may be written."""
        place = self._turn % _NUM_BUFFERS
        self._turn += 1
        if place == len(self._buffers):
            self._buffers.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True))
            self._sent.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._sent[place].synchronize()
        staged = self._buffers[place][: source.nbytes].view(source.dtype).view(source.shape)
        _populate(source)
        # By numpy: torch would start threads of its own in each of these.
        np.copyto(staged.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(begins)
            target.copy_(staged, non_blocking=True)
            event.record(self.stream)
        self._sent[place] = event
        return event


def uploaded(
    tensors: Iterable[tuple[str, Tensor | Other]], device: torch.device
) -> Iterator[tuple[str, Tensor | Other]]:
    """The same in their order, tensors on a GPU. What has been yielded may still be under way on the current stream."""
    num_threads = max(1, min(MAX_THREADS, len(current_cpus()) or os.cpu_count() or 1))
    # A new thread is on the first GPU, and would take memory there.
    use_device = partial(torch.cuda.set_device, torch.cuda.current_device() if device.index is None else device)
    lane = _Lane(device)
    waiting: deque[tuple[str, Tensor | Other] | _Upload] = deque()
    ahead = 0
    with ThreadPoolExecutor(num_threads, "upload", use_device) as pool:
        for name, tensor in tensors:
            if isinstance(tensor, Tensor) and _in_pieces(tensor):
                waiting.append(_begin(name, tensor, device, lane, pool))
                ahead += tensor.nbytes
            else:
                waiting.append((name, tensor.to(device) if isinstance(tensor, Tensor) else tensor))
            while ahead > AHEAD_BYTES:
                first = waiting.popleft()
                ahead -= first.source.nbytes if isinstance(first, _Upload) else 0
                yield _arrived(first, device)
        while waiting:
            yield _arrived(waiting.popleft(), device)


def _in_pieces(tensor: Tensor) -> bool:
    """Whether a tensor is worth it, and made of rows that are in one piece each and fit a buffer."""
    if tensor.is_cuda or tensor.nbytes <= SMALL_BYTES:
        return False
    return tensor.stride(-1) == 1 and tensor.nbytes // len(tensor) <= PIECE_BYTES


def _begin(name: str, tensor: Tensor, device: torch.device, lane: _Lane, pool: ThreadPoolExecutor) -> _Upload:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    # What used its memory before has been enqueued on this stream.
    begins = torch.cuda.current_stream(device).record_event()
    at_once = PIECE_BYTES // (tensor.nbytes // len(tensor))
    places = [slice(begin, begin + at_once) for begin in range(0, len(tensor), at_once)]
    pieces = [pool.submit(lambda rows: lane.send(tensor[rows], made[rows], begins), rows) for rows in places]
    return _Upload(name, tensor, made, pieces)


def _arrived(waiting: tuple[str, Tensor | Other] | _Upload, device: torch.device) -> tuple[str, Tensor | Other]:
    if isinstance(waiting, _Upload):
        return waiting.name, waiting.wait(torch.cuda.current_stream(device))
    return waiting


def _populate(source: Tensor) -> None:
    """Map a file's pages, where the tensor is in one piece: threads that meet faults wait for each other."""
    if not source.is_contiguous():
        return
    begin = source.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    # Of no use where it fails: then they are mapped when they are read.
    _madvise()(ctypes.c_void_p(begin), ctypes.c_size_t(source.data_ptr() + source.nbytes - begin), _POPULATE_READ)


@cache
def _madvise() -> Any:
    return ctypes.CDLL(None).madvise
