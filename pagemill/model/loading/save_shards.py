"""`save_shards`: what one rank reads of a checkpoint, in files of its own, for --load-format sharded_state.

The tensors are those of the checkpoint, in its format, so that a state loads with any precision with which the
checkpoint does. They are read once more for it: repacked weights are another machine's business.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from pagemill.artifacts.hub import PATTERNS
from pagemill.artifacts.weight_index import INDEX
from pagemill.errors import ConfigError
from pagemill.model.loading.load_place import LoadPlace
from pagemill.model.loading.load_weights import LoadableModel, Selection, Source
from pagemill.model.loading.part import Part
from pagemill.model.loading.shards import MAX_FILE_BYTES, ShardEntry, ShardHeader, file_name


def copy_descriptions(model: Path, folder: Path) -> None:
    """Make the folder, and in it what a model's folder says besides the weights: its JSON files, tokenizer and chat
    template. Raises ConfigError when it cannot be written, or is the model's own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.samefile(model):
            raise ConfigError(f"{folder} is the folder of the model itself; name another one")
        found = {path for pattern in PATTERNS for path in model.rglob(pattern)}
        for path in sorted(found):
            if path.is_file() and path.name != INDEX:
                target = folder / path.relative_to(model)
                target.parent.mkdir(exist_ok=True, parents=True)
                shutil.copyfile(path, target)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error


class _Recorded(Selection):
    """Keeps what the model said to every tensor that a source has asked about since the last file."""

    def __init__(self, model: LoadableModel) -> None:
        super().__init__(model)
        self.entries: list[ShardEntry] = []

    def __call__(self, name: str, shape: tuple[int, ...]) -> Part | None:
        part = super().__call__(name, shape)
        self.entries.append(ShardEntry(name, tuple(shape), part))
        return part


def save_shards(
    model: LoadableModel,
    source: Source,
    folder: Path,
    place: LoadPlace,
    pattern: str,
    max_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """The names of the files of this rank, which are written one after the other. `model`: without weights. Raises
    ConfigError when the folder cannot be written, or one of them is there; ModelError for what the checkpoint lacks."""
    selection = _Recorded(model)
    names: list[str] = []

    def write(tensors: dict[str, Tensor], *, last: bool) -> None:
        listed = [entry for entry in selection.entries if entry.part is None or entry.name in tensors]
        left = [entry for entry in selection.entries if entry.part is not None and entry.name not in tensors]
        header = ShardHeader(place.world_size, last, tuple(listed))
        names.append(_write(folder / file_name(pattern, place.rank, len(names)), tensors, header))
        selection.entries = left

    waiting: dict[str, Tensor] = {}
    for name, tensor in _tensors(source, selection):
        selection.check(name, tensor)
        if waiting and sum(held.nbytes for held in waiting.values()) + tensor.nbytes > max_bytes:
            write(waiting, last=False)
            waiting = {}
        waiting[name] = tensor
    selection.check_complete()
    write(waiting, last=True)
    return names


def _tensors(source: Source, selection: Selection) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in source(selection):
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                "a sharded state is saved from safetensors: every rank reads its own part of a GGUF file as it is"
            )
        yield name, tensor.cpu()


def _write(path: Path, tensors: dict[str, Tensor], header: ShardHeader) -> str:
    if path.exists():
        raise ConfigError(f"{path} is there already; name an empty folder")
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, unfinished, metadata=header.encoded())
        os.replace(unfinished, path)  # noqa: PTH105 - a file of that name is complete
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    return path.name
