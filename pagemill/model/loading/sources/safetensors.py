"""Weights of a Hugging Face folder: model.safetensors, or shards with an index. Mapped, not read into memory;
where the place wants that, left in the files altogether."""

import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagemill.artifacts.weight_index import names_of_weight_files, safetensors_places
from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.model.loading.file_tensor import FileTensor, OpenFile
from pagemill.model.loading.load_place import ALONE, LoadPlace
from pagemill.model.loading.part import Part, Select, whole
from pagemill.utils.reasons import reason

_FORGET_BYTES = 32 << 20
"""A file is mapped anew after so many bytes of tensors."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Of tensors that are left in files. Others are mapped."""


def iterate(
    facts: ModelFacts, dtype: torch.dtype, seed: int, select: Select = whole, place: LoadPlace = ALONE
) -> Iterator[tuple[str, Tensor | FileTensor]]:
    """(name, selected part) of every file, as stored. Raises ModelError for a missing or damaged file, ConfigError for
    any option."""
    place.check_options("safetensors")
    for path in weight_files(Path(facts.path)):
        try:
            yield from read_file(path, select, place)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name} cannot be read: {reason(error)}") from error


def read_file(path: Path, select: Select, place: LoadPlace = ALONE) -> Iterator[tuple[str, Tensor | FileTensor]]:
    """(name, selected part) of one file, as stored. Raises SafetensorError and OSError."""
    names: deque[str] | None = None
    while names is None or names:
        # A mapping ends with the first tensors, so that its pages do not stay in memory beside the weights that are
        # made of them.
        with safe_open(path, framework="pt") as file:  # which sees that the header is in order
            if names is None:
                places = _Places(path) if place.leaves_in_files else None
                # In the order of the file, where that is read once, by several threads.
                names = deque(file.keys() if places is None else file.offset_keys())
            yield from _read_some(file, names, select, places)


def _read_some(
    file: Any, names: deque[str], select: Select, places: "_Places | None"
) -> Iterator[tuple[str, Tensor | FileTensor]]:
    """The first of these, until so many bytes of them are mapped."""
    num_bytes = 0
    while names and num_bytes < _FORGET_BYTES:
        name = names.popleft()
        shape = tuple(file.get_slice(name).get_shape()) if places is None else places.shape(name)
        part = select(name, shape)
        if part is None:
            continue
        left = None if places is None else places.find(name, shape, part)
        if left is not None:
            yield name, left
            continue
        tensor = _read(file, name, part)
        num_bytes += tensor.nbytes
        # Vectors are kept as they are, and one of them would keep the whole mapping.
        yield name, tensor.clone() if tensor.ndim < 2 else tensor


class _Places:
    """Where the tensors of a file are that safetensors has found in order."""

    def __init__(self, path: Path) -> None:
        self._file = OpenFile(path)
        self._header, self._begin = safetensors_places(path)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, as the header says it."""
        return tuple(self._header[name]["shape"])

    def find(self, name: str, shape: tuple[int, ...], part: Part) -> FileTensor | None:
        """A part; None for one that is not in one piece, or of a type that not every torch has."""
        entry = self._header[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            return None
        offset = self._begin + entry["data_offsets"][0]
        if part.covers(shape):
            return FileTensor(self._file, offset, shape, dtype)
        if part.dim:
            return None
        of_row = shape[1:]
        begin = part.start * math.prod(of_row) * dtype.itemsize
        return FileTensor(self._file, offset + begin, (part.stop - part.start, *of_row), dtype)


def _read(file: Any, name: str, part: Part) -> Tensor:
    tensor = file.get_slice(name)
    if part.covers(tuple(tensor.get_shape())):
        whole_tensor: Tensor = file.get_tensor(name)
        return whole_tensor
    rows = slice(part.start, part.stop)
    read: Tensor = tensor[(slice(None),) * part.dim + (rows,)]
    return read


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises ModelError for a missing one."""
    files = [folder / name for name in names_of_weight_files(folder)]
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path.name} is missing from {folder}")
    return files
