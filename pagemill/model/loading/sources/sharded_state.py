"""Weights that `save_sharded_state` wrote: each rank reads its own files, and of them everything."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.model.loading.file_tensor import FileTensor
from pagemill.model.loading.load_place import ALONE, LoadPlace
from pagemill.model.loading.part import Part, Select, whole
from pagemill.model.loading.shards import PATTERN, ShardEntry, ShardHeader, checked_pattern, decoded, file_name
from pagemill.model.loading.sources.safetensors import read_file
from pagemill.utils.reasons import reason
from pagemill.utils.text import shown, shown_name


def iterate(
    facts: ModelFacts, dtype: torch.dtype, seed: int, select: Select = whole, place: LoadPlace = ALONE
) -> Iterator[tuple[str, Tensor | FileTensor]]:
    """(name, part) of every tensor in this rank's files. Raises ModelError for a missing or damaged file, and for a
    state of a model that is split otherwise, ConfigError for an option that is not `pattern`."""
    place.check_options("sharded_state", ("pattern",))
    pattern = checked_pattern(place.options.get("pattern", PATTERN))
    number = 0
    last = False
    while not last:
        path = Path(facts.path) / file_name(pattern, place.rank, number)
        if not path.is_file():
            raise ModelError(f"{path.parent} has no {path.name}, which is needed by rank {place.rank} of "
                             f"{place.world_size}; was the state saved by as many ranks?")  # fmt: skip
        try:
            header = _header(path, place)
            yield from read_file(path, _OneFile(path, header, select), place)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name} cannot be read: {reason(error)}") from error
        last = header.last
        number += 1


def _header(path: Path, place: LoadPlace) -> ShardHeader:
    with safe_open(path, framework="pt") as file:
        header = decoded(path.name, file.metadata())
        kept = {entry.name for entry in header.entries if entry.part is not None}
        unlisted = kept.symmetric_difference(file.keys())
    if unlisted:
        raise ModelError(
            f"{path.name} is damaged: its metadata and its tensors differ in tensor {shown_name(min(unlisted))}"
        )
    if header.world_size != place.world_size:
        raise ModelError(f"{path.name} was saved by {header.world_size} ranks, and this is one of {place.world_size}")
    return header


class _OneFile:
    """Selects the tensors of one file by what they are parts of."""

    def __init__(self, path: Path, header: ShardHeader, select: Select) -> None:
        self._path = path
        self._entries = {entry.name: entry for entry in header.entries}
        self._select = select
        for entry in header.entries:
            if entry.part is None:
                self._ask(entry)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """All of a tensor of the file, or nothing. Raises ModelError where the model wants another part of it."""
        entry = self._entries[name]
        part = self._ask(entry)
        if part is None:
            return None
        if entry.part is None or shape != _shape_of(entry.shape, entry.part):
            raise ModelError(f"{self._path.name} is damaged: tensor {shown_name(name)} has shape {shown(shape)}")
        return whole(name, shape)

    def _ask(self, entry: ShardEntry) -> Part | None:
        """What the model wants of a tensor. Raises ModelError where that is not what was saved."""
        wanted = self._select(entry.name, entry.shape)
        if wanted is not None and (entry.part is None or not _same(wanted, entry.part, entry.shape)):
            raise ModelError(
                f"{self._path.name} has another part of tensor {shown_name(entry.name)} than is needed: the state "
                "was saved by ranks that split the model otherwise"
            )
        return wanted


def _same(wanted: Part, saved: Part, shape: tuple[int, ...]) -> bool:
    if wanted.covers(shape):
        return saved.covers(shape)
    return (wanted.dim, wanted.start, wanted.stop) == (saved.dim, saved.start, saved.stop)


def _shape_of(shape: tuple[int, ...], part: Part) -> tuple[int, ...]:
    if not shape:
        return shape
    return (*shape[: part.dim], part.stop - part.start, *shape[part.dim + 1 :])
