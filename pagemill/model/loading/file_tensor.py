"""`FileTensor`: a tensor that lies in one piece in a file, and has not been read. Knows no format."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.utils.reasons import reason


class OpenFile:
    """A file that is read at any place by any thread; it is closed when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = -1
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenFile) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer with what the file has from `offset` on. Raises ModelError where that is not so much."""
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
                if not count:
                    raise ModelError(
                        f"{self.path.name} ends before the last of its tensors: is it still being written?"
                    )
                done += count
        except OSError as error:
            raise ModelError(f"{self.path.name} cannot be read: {reason(error)}") from error


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where a tensor is, and what. Two are equal if they are the same bytes of the same file."""

    file: OpenFile
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fill the buffer with the tensor's bytes from `begin` on. Raises ModelError for a file that ends before."""
        self.file.read_into(self.offset + begin, buffer)

    def read(self) -> Tensor:
        """The tensor, in new memory. Raises ModelError for a file that ends before."""
        made = torch.empty(self.nbytes, dtype=torch.uint8)
        self.read_into(0, memoryview(made.numpy()))  # type: ignore[arg-type]
        return made.view(self.dtype).view(self.shape)
