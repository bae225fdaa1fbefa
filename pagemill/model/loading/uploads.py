"""`Uploads`: tensors of files, or of memory, to a device, with some on their way ahead of the one that is wanted. Knows
no format, and no model. Threads of an `UploadPool` read and send them.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from pagemill.model.loading.file_tensor import FileTensor
from pagemill.model.loading.upload_pool import IN_MEMORY, PoolLibrary, Source, UploadPool, pool_library
from pagemill.platforms.interface import Copier
from pagemill.utils.cpu_affinity import current_cpus

PIECE_BYTES: Final = 4 << 20
"""Of a buffer: large enough that sending one takes longer than asking for it, small enough to be pinned in no time."""
NUM_BUFFERS: Final = 2
"""Of each thread: one is filled while the other is sent."""
MAX_THREADS: Final = 12
"""They read a third faster than the bus sends; eight, by a sixth slower."""
AHEAD_BYTES: Final = 512 << 20
"""Of tensors on their way before the first of them is waited for."""
GUESS_BYTES: Final = 8 << 30
"""Of tensors that are sent before it is known that they are wanted; of the device's free memory no more than a
quarter."""
ROOM_BYTES: Final = 512 << 20
"""Of memory that is taken for them at once."""
SMALL_BYTES: Final = 1 << 20
"""A tensor of no more that is in memory is sent as it is."""

Other = TypeVar("Other")


@dataclass(frozen=True, slots=True)
class _Upload:
    """A tensor on its way."""

    source: FileTensor | Tensor
    target: Tensor
    number: int
    """In the pool."""


class Uploads:
    """A context, within which tensors go to `device`; what is on its way when it ends is given up.

    Made and used by the thread that uses the tensors. Raises PagemillError where the system has no more threads.
    """

    def __init__(
        self, library: PoolLibrary, copier: Copier, device: torch.device, num_threads: int | None = None
    ) -> None:
        self._copier = copier
        self._device = device
        cpus = len(current_cpus()) or os.cpu_count() or 1
        # A quarter of the CPUs is left to the thread that builds the model, and to the rest of the system.
        num_threads = num_threads or max(1, min(MAX_THREADS, cpus - cpus // 4))
        self._pool = UploadPool(library, copier, num_threads, PIECE_BYTES, NUM_BUFFERS)
        self._guessed: dict[FileTensor, _Upload] = {}
        self._under_way: deque[tuple[str, _Upload | object, int]] = deque()
        """(name, tensor or what else there is, bytes), in their order."""

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(self, *_: object) -> None:
        """Return when nothing is read and sent any more: then memory that tensors were sent to may be used again."""
        given_up = [upload for _, upload, _ in self._under_way if isinstance(upload, _Upload)]
        self._pool.close([upload.number for upload in (*given_up, *self._guessed.values())])
        self._under_way.clear()
        self._guessed.clear()

    def guess(self, tensors: Iterable[FileTensor]) -> None:
        """Begin to send what will be wanted first, as far as there is memory for it; the rest is not asked for. What
        will not be wanted has been sent in vain, and that it cannot be read is no error."""
        left = min(GUESS_BYTES, self._copier.free_bytes() // 4)
        room = 0
        with suppress(torch.OutOfMemoryError):
            for tensor in tensors:
                left -= tensor.nbytes
                room -= tensor.nbytes
                if left < 0:
                    return
                if room < 0:
                    # Torch's allocator divides what it has. Of tensors that lie side by side, layers make larger ones,
                    # and what they leave is large enough for those of the next layers.
                    room = min(ROOM_BYTES, left)
                    torch.empty(room, dtype=torch.uint8, device=self._device)
                if tensor not in self._guessed:
                    self._guessed[tensor] = self._left_in_file(tensor)

    def arriving(
        self, tensors: Iterable[tuple[str, Tensor | FileTensor | Other]]
    ) -> Iterator[tuple[str, Tensor | Other]]:
        """The same in their order, tensors on the device; asked for once. What has been yielded may still be under way,
        ahead of what is enqueued on the main stream from then on. Raises ModelError for files that end early."""
        ahead = 0
        for name, tensor in tensors:
            num_bytes = tensor.nbytes if isinstance(tensor, Tensor | FileTensor) else 0
            self._under_way.append((name, self._begin(tensor), num_bytes))
            ahead += num_bytes
            while ahead > AHEAD_BYTES:
                ahead -= self._under_way[0][2]
                yield self._arrived()
        self._pool.complete()
        while self._under_way:
            yield self._arrived()

    def _begin(self, tensor: Tensor | FileTensor | Other) -> _Upload | Tensor | Other:
        if isinstance(tensor, FileTensor):
            return self._guessed.pop(tensor, None) or self._left_in_file(tensor)
        if not isinstance(tensor, Tensor):
            return tensor
        source = _in_memory(tensor)
        return tensor.to(self._device) if source is None else self._upload(tensor, source)

    def _left_in_file(self, tensor: FileTensor) -> _Upload:
        return self._upload(tensor, Source(tensor.file.number, tensor.offset, tensor.nbytes))

    def _upload(self, tensor: FileTensor | Tensor, source: Source) -> _Upload:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        return _Upload(tensor, target, self._pool.add(source, target.data_ptr()))

    def _arrived(self) -> tuple[str, Any]:
        """The first of those under way, all of which has been read."""
        name, upload, _ = self._under_way.popleft()
        if not isinstance(upload, _Upload):
            return name, upload
        source = upload.source
        self._pool.wait(upload.number, source.file.path.name if isinstance(source, FileTensor) else name)
        return name, upload.target


def uploads_to(device: torch.device, copier: Copier | None) -> AbstractContextManager[Uploads | None]:
    """Uploads to a device; None where there are none: then weights get there by torch's own copies."""
    library = None if copier is None else pool_library()
    return nullcontext() if copier is None or library is None else Uploads(library, copier, device)


def _in_memory(tensor: Tensor) -> Source | None:
    """Where a tensor is; None for one that is not worth it, or not made of rows that fit a buffer."""
    if tensor.device.type != "cpu" or tensor.nbytes <= SMALL_BYTES:
        return None
    if tensor.is_contiguous():
        return Source(IN_MEMORY, tensor.data_ptr(), tensor.nbytes, 1, 1)
    for shape in ((len(tensor), -1), (-1, tensor.shape[-1])):
        try:
            rows = tensor.view(shape)
        except RuntimeError:  # strides that this shape cannot have
            continue
        row_bytes = rows.shape[1] * tensor.itemsize
        if rows.stride(1) == 1 and row_bytes <= PIECE_BYTES:
            return Source(IN_MEMORY, tensor.data_ptr(), tensor.nbytes, row_bytes, rows.stride(0) * tensor.itemsize)
    return None
