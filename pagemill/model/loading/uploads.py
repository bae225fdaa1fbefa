"""`Uploads`: tensors of files to a device, by threads that read pieces into pinned buffers and send them. Knows no
format, and no model.

What is asked of Python is little, as a dozen threads share its lock with the one that builds the model: of each piece,
one system call that reads, and three short calls of the driver.
"""

import contextlib
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pagemill.errors import PagemillError
from pagemill.log import get_logger
from pagemill.model.kernels.weight_memory import WeightMemory
from pagemill.model.loading.file_tensor import FileTensor
from pagemill.platforms.interface import Copier
from pagemill.utils.cpu_affinity import current_cpus

PIECE_BYTES: Final = 8 << 20
"""Of a buffer: large enough that reading one takes much longer than waiting for Python's lock."""
NUM_BUFFERS: Final = 2
"""Of each thread: one is filled while the other is sent."""
MAX_THREADS: Final = 12
AHEAD_BYTES: Final = 512 << 20
"""Of tensors on their way before the first of them is waited for."""
GUESS_BYTES: Final = 4 << 30
"""Of tensors that are sent before it is known that they are wanted; of the device's free memory no more than a
quarter."""
SMALL_BYTES: Final = 1 << 20
"""A tensor of no more that is in memory is sent as it is."""
SWITCH_S: Final = 1e-4
"""How long a thread that has read a piece waits at most before it asks for Python's lock: by default it is 5 ms, longer
than the piece took."""

Other = TypeVar("Other")

logger = get_logger(__name__)


class Bytes(Protocol):
    """Where the bytes of a tensor come from."""

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fill the buffer with those from `begin` on. Called by any thread."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor in memory, or mapped, made of rows that are in one piece each."""

    tensor: Tensor

    def read_into(self, begin: int, buffer: memoryview) -> None:
        row_bytes = self.tensor.nbytes // len(self.tensor)
        first = begin // row_bytes
        rows = self.tensor[first : first + len(buffer) // row_bytes].view(torch.uint8).numpy()
        # By numpy: torch would start threads of its own in each of these.
        np.copyto(np.frombuffer(buffer, np.uint8).reshape(rows.shape), rows)


@dataclass(slots=True)
class _Upload:
    """A tensor on its way."""

    source: Bytes
    target: Tensor
    address: int
    """Of the target."""
    begins: int
    """The event from which on the target may be written: what used its memory before has been enqueued by then."""
    num_pieces: int
    sent: SimpleQueue[int | Exception] = field(default_factory=SimpleQueue)
    """Of each piece that has been read and enqueued, in any order, the event when it will have been sent, or why it
    cannot be read."""


@dataclass(frozen=True, slots=True)
class _Piece:
    upload: _Upload
    begin: int
    num_bytes: int


class _Buffer:
    """Pinned memory for one piece."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        memory = WeightMemory().empty(PIECE_BYTES, dtype=torch.uint8)
        self.address = memory.data_ptr()
        array = memory.numpy()
        array[:: mmap.PAGESIZE] = 0  # here each thread makes its pages; the driver would make all threads' in turn
        self.bytes = memoryview(array)  # type: ignore[arg-type]
        self._pinned = copier.pin(self.address, PIECE_BYTES)
        self.sent = copier.make_event()

    def close(self) -> None:
        """Give the memory back when it has been sent."""
        self._copier.finish(self.sent)
        self._copier.end_event(self.sent)
        if self._pinned:
            self._copier.unpin(self.address)


class _Lane:
    """What one thread has: a stream, and buffers that are used by turns."""

    def __init__(self, copier: Copier) -> None:
        copier.enter()
        self._copier = copier
        self._stream = copier.make_stream()
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def send(self, piece: _Piece) -> int:
        """Read and enqueue one piece; the event when it will have been sent."""
        place = self._turn % NUM_BUFFERS
        if place == len(self._buffers):
            self._buffers.append(_Buffer(self._copier))
        self._turn += 1
        buffer = self._buffers[place]
        upload = piece.upload
        self._copier.finish(buffer.sent)
        upload.source.read_into(piece.begin, buffer.bytes[: piece.num_bytes])
        self._copier.hold(upload.begins, self._stream)
        self._copier.copy(upload.address + piece.begin, buffer.address, piece.num_bytes, self._stream)
        self._copier.record(buffer.sent, self._stream)
        return buffer.sent

    def close(self) -> None:
        """Return when everything has been sent."""
        for buffer in self._buffers:
            buffer.close()
        self._copier.end_stream(self._stream)


class Uploads:
    """A context, within which tensors go to `device`; what is on its way when it ends is given up.

    Made, and used but for `guess`, by the thread that uses the tensors.
    """

    def __init__(self, copier: Copier, device: torch.device, num_threads: int | None = None) -> None:
        self._copier = copier
        self._device = device
        cpus = len(current_cpus()) or os.cpu_count() or 1
        # A quarter of the CPUs is left to the thread that builds the model, and to the rest of the system.
        self._num_threads = num_threads or max(1, min(MAX_THREADS, cpus - cpus // 4))
        self._threads: list[threading.Thread] = []
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._guesser: threading.Thread | None = None
        self._guessed: dict[FileTensor, _Upload] = {}
        self._guesses = True
        self._given_up = False
        self._under_way: deque[tuple[str, _Upload | object, int]] = deque()
        """(name, tensor or what else there is, bytes), in their order."""
        self._switch_s = sys.getswitchinterval()

    def __enter__(self) -> "Uploads":
        sys.setswitchinterval(min(SWITCH_S, self._switch_s))
        for number in range(self._num_threads):
            thread = threading.Thread(target=self._work, name=f"upload-{number}")
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                if not self._threads:
                    raise
                break
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        """Return when nothing is read and sent any more: then memory that tensors were sent to may be used again."""
        self._given_up = True
        self._stop_guessing()
        for _thread in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()
        given_up = [upload for _, upload, _ in self._under_way if isinstance(upload, _Upload)]
        for upload in (*given_up, *self._guessed.values()):
            self._copier.end_event(upload.begins)
        self._under_way.clear()
        self._guessed.clear()
        sys.setswitchinterval(self._switch_s)

    def guess(self, tensors: Iterable[FileTensor]) -> None:
        """Begin to send what will be wanted first, by another thread; what is not will have been sent in vain."""
        self._guesser = threading.Thread(target=self._guess, args=(tensors,), name="upload-guess")
        self._guesser.start()

    def arriving(
        self, tensors: Iterable[tuple[str, Tensor | FileTensor | Other]]
    ) -> Iterator[tuple[str, Tensor | Other]]:
        """The same in their order, tensors on the device. What has been yielded may still be under way to it, ahead of
        what is enqueued on the main stream from then on. Raises ModelError for files that end early."""
        self._stop_guessing()
        ahead = 0
        for name, tensor in tensors:
            num_bytes = tensor.nbytes if isinstance(tensor, Tensor | FileTensor) else 0
            self._under_way.append((name, self._begin(tensor), num_bytes))
            ahead += num_bytes
            while ahead > AHEAD_BYTES:
                ahead -= self._under_way[0][2]
                yield self._arrived()
        while self._under_way:
            yield self._arrived()

    def _begin(self, tensor: Tensor | FileTensor | Other) -> _Upload | Tensor | Other:
        if isinstance(tensor, FileTensor):
            return self._guessed.pop(tensor, None) or self._upload(tensor, tensor.shape, tensor.dtype, 1)
        if not isinstance(tensor, Tensor):
            return tensor
        if _in_pieces(tensor):
            return self._upload(_Rows(tensor), tensor.shape, tensor.dtype, tensor.nbytes // len(tensor))
        return tensor.to(self._device)

    def _upload(self, source: Bytes, shape: Iterable[int], dtype: torch.dtype, row_bytes: int) -> _Upload:
        """`row_bytes`: a piece has whole rows of so many."""
        target = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        begins = self._copier.make_event()
        self._copier.record(begins)
        num_bytes = target.nbytes
        places = range(0, num_bytes, PIECE_BYTES // row_bytes * row_bytes)
        upload = _Upload(source, target, target.data_ptr(), begins, len(places))
        for begin in places:
            self._pieces.put(_Piece(upload, begin, min(places.step, num_bytes - begin)))
        return upload

    def _arrived(self) -> tuple[str, Any]:
        """The first of those under way, all of which has been read."""
        name, upload, _ = self._under_way.popleft()
        if not isinstance(upload, _Upload):
            return name, upload
        errors = []
        for _piece in range(upload.num_pieces):
            sent = upload.sent.get()
            if isinstance(sent, Exception):
                errors.append(sent)
            else:
                self._copier.hold(sent)
        self._copier.end_event(upload.begins)
        if errors:
            raise errors[0]
        return name, upload.target

    def _work(self) -> None:
        """What a thread does: pieces, as long as there are any."""
        lane: _Lane | None = None
        while (piece := self._pieces.get()) is not None:
            if self._given_up:
                continue
            try:
                lane = lane or _Lane(self._copier)
                piece.upload.sent.put(lane.send(piece))
            except Exception as error:  # whatever it is, who waits for the piece has it
                piece.upload.sent.put(error)
        if lane is not None:
            with contextlib.suppress(PagemillError):  # of a device that has failed: who waited for it knows
                lane.close()

    def _guess(self, tensors: Iterable[FileTensor]) -> None:
        try:
            self._copier.enter()
            left = min(GUESS_BYTES, self._copier.free_bytes() // 4)
            for tensor in tensors:
                left -= tensor.nbytes
                if left < 0 or not self._guesses:
                    return
                if tensor not in self._guessed:
                    self._guessed[tensor] = self._upload(tensor, tensor.shape, tensor.dtype, 1)
        except Exception as error:
            # What is wrong with files shows when they are read in earnest, and memory may be enough without guesses.
            logger.debug("weights are not read ahead of the model: %s", error)

    def _stop_guessing(self) -> None:
        self._guesses = False
        if self._guesser is not None:
            self._guesser.join()
            self._guesser = None


def _in_pieces(tensor: Tensor) -> bool:
    """Whether a tensor is worth it, and made of rows that are in one piece each and fit a buffer."""
    if tensor.device.type != "cpu" or tensor.nbytes <= SMALL_BYTES:
        return False
    return tensor.stride(-1) == 1 and tensor.nbytes // len(tensor) <= PIECE_BYTES
