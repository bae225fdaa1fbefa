"""What lies in the files of a sharded state: the tensors of one rank, and which parts of the checkpoint's they are.

Each file is safetensors; its metadata lists the tensors that came up while the file was filled, of other ranks too.
Knows neither models nor ranks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagemill.errors import ConfigError, ModelError
from pagemill.model.loading.part import Part

PATTERN: Final = "model-rank-{rank}-part-{part}.safetensors"
MAX_FILE_BYTES: Final = 512 << 20
"""Of one file, unless a tensor is larger: what is written is in memory meanwhile."""
METADATA: Final = "pagemill_sharded_state"
VERSION: Final = 1
MAX_DIMS: Final = 8
_FIELDS: Final = ("version", "world_size", "last", "tensors")


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One tensor of the checkpoint that a state was saved from."""

    name: str
    shape: tuple[int, ...]
    """In the checkpoint."""
    part: Part | None
    """What the file has of it; None: nothing."""


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What the metadata of one file says."""

    world_size: int
    """Ranks that the state was saved by."""
    last: bool
    """Whether it is the rank's last file."""
    entries: tuple[ShardEntry, ...]

    def encoded(self) -> dict[str, str]:
        """The metadata of the file."""
        tensors = [
            (entry.name, entry.shape, entry.part and (entry.part.dim, entry.part.start, entry.part.stop))
            for entry in self.entries
        ]
        values = (VERSION, self.world_size, self.last, tensors)
        return {METADATA: json.dumps(dict(zip(_FIELDS, values, strict=True)))}


def file_name(pattern: str, rank: int, part: int) -> str:
    """The name of a file, counted from 0."""
    return pattern.replace("{rank}", str(rank)).replace("{part}", str(part))


def checked_pattern(pattern: object) -> str:
    """A pattern of names. Raises ConfigError for one that is not of plain files, one for each rank and part."""
    if (
        not isinstance(pattern, str)
        or "/" in pattern
        or not pattern.endswith(".safetensors")
        or any(pattern.count(field) != 1 for field in ("{rank}", "{part}"))
    ):
        raise ConfigError(f"pattern={pattern!r} is not allowed: the name of a .safetensors file with {{rank}} and "
                          "{part} in it")  # fmt: skip
    return pattern


def decoded(file: str, metadata: Mapping[str, str] | None) -> ShardHeader:
    """Raises ModelError for a file that was not written here, or is damaged."""
    text = (metadata or {}).get(METADATA)
    if text is None:
        raise ModelError(f"{file} is no sharded state that pagemill has saved: its metadata lacks {METADATA}")
    try:
        header = json.loads(text)
        version, world_size, last, tensors = (header[name] for name in _FIELDS)
        if version != VERSION or not isinstance(tensors, list) or not isinstance(last, bool):
            raise ValueError(f"version {version!r}, and this is {VERSION}")
        entries = tuple(_entry(*tensor) for tensor in tensors)
        return ShardHeader(_size(world_size), last, entries)
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ModelError(f"{file} is damaged: {METADATA} in its metadata: {str(error)[:80]}") from error


def _entry(name: Any, shape: Any, part: Any) -> ShardEntry:
    sizes = tuple(_size(size) for size in shape)
    if not isinstance(name, str) or len(sizes) > MAX_DIMS:
        raise ValueError("not a name and a shape")
    if part is None:
        return ShardEntry(name, sizes, None)
    dim, start, stop = (_size(number) for number in part)
    extents = sizes or (1,)
    if dim >= len(extents) or not start <= stop <= extents[dim]:
        raise ValueError("a part outside its tensor")
    return ShardEntry(name, sizes, Part(dim, start, stop))


def _size(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError("not a size")
    return number
