"""Weights of a Hugging Face folder: model.safetensors, or shards with an index. Mapped, not read into memory."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagemill.artifacts.weight_index import names_of_weight_files
from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.model.loading.load_place import ALONE, LoadPlace
from pagemill.model.loading.part import Part, Select, whole
from pagemill.utils.reasons import reason

_FORGET_BYTES = 32 << 20
"""A file is mapped anew after so many bytes of tensors."""


def iterate(
    facts: ModelFacts, dtype: torch.dtype, seed: int, select: Select = whole, place: LoadPlace = ALONE
) -> Iterator[tuple[str, Tensor]]:
    """(name, selected part) of every file, as stored. Raises ModelError for a missing or damaged file, ConfigError for
    any option."""
    place.check_options("safetensors")
    for path in weight_files(Path(facts.path)):
        try:
            yield from read_file(path, select)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name} cannot be read: {reason(error)}") from error


def read_file(path: Path, select: Select) -> Iterator[tuple[str, Tensor]]:
    """(name, selected part) of one file, as stored. Raises SafetensorError and OSError."""
    with safe_open(path, framework="pt") as file:
        names = deque(file.keys())
    while names:
        yield from _read_some(path, names, select)


def _read_some(path: Path, names: deque[str], select: Select) -> Iterator[tuple[str, Tensor]]:
    """The first of these, from a mapping that ends with them, so that its pages do not stay in memory beside the
    weights that are made of them."""
    num_bytes = 0
    with safe_open(path, framework="pt") as file:
        while names and num_bytes < _FORGET_BYTES:
            name = names.popleft()
            part = select(name, tuple(file.get_slice(name).get_shape()))
            if part is not None:
                tensor = _read(file, name, part)
                num_bytes += tensor.nbytes
                # Vectors are kept as they are, and one of them would keep the whole mapping.
                yield name, tensor.clone() if tensor.ndim < 2 else tensor


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
