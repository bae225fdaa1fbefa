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
    """A file that is read at any place by any thread; it is closed when nothing refers to it any more. Two are equal if
    they are the same file."""

    def __init__(self, path: Path) -> None:
        """Raises OSError for a file that cannot be opened."""
        self.number = -1
        """Of the system's."""
        self.path = path
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenFile) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)


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

    def read(self) -> Tensor:
        """The tensor, in new memory. Raises ModelError where the file cannot be read, or ends before."""
        made = torch.empty(self.nbytes, dtype=torch.uint8)
        left = memoryview(made.numpy())  # type: ignore[arg-type]
        try:
            while left:
                count = os.preadv(self.file.number, [left], self.offset + self.nbytes - len(left))
                if not count:
                    raise ModelError(f"{self.file.path.name} ends before the last of its tensors")
                left = left[count:]
        except OSError as error:
            raise ModelError(f"{self.file.path.name} cannot be read: {reason(error)}") from error
        return made.view(self.dtype).view(self.shape)
