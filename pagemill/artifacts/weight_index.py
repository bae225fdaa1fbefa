"""Which .safetensors files a folder's index names, and what such a file says that it holds. Reads no weight."""

import json
import sys
from pathlib import Path
from typing import Any

from pagemill.artifacts.json_file import read_json_object
from pagemill.artifacts.plain_file import check_plain
from pagemill.errors import ModelError

SINGLE = "model.safetensors"
MEDUSA = "medusa_lm_head.safetensors"
"""What heads of Medusa are saved as, without a model."""
INDEX = "model.safetensors.index.json"
MAX_NAME_CHARS = 200
MAX_HEADER_BYTES = 64 << 20
_SHOWN_CHARS = 60
_LENGTH_BYTES = 8
"""Of the number that a safetensors file begins with: the length of its header."""


def names_of_weight_files(folder: Path) -> list[str]:
    """The names in the index, each of a file in this folder whether it is there or not; without an index, the name of
    the single file. Raises ModelError for an index that is damaged, or names anything else."""
    index = folder / INDEX
    if not index.exists():
        only_heads = (folder / MEDUSA).exists() and not (folder / SINGLE).exists()
        return [MEDUSA if only_heads else SINGLE]
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index} is damaged: weight_map is not an object with names of files")
    for name in places.values():
        if not isinstance(name, str) or not _is_plain(name):
            raise ModelError(
                f"{index} is damaged: weight_map names {str(name)[:_SHOWN_CHARS]!r}, and not a .safetensors file of "
                "this folder"
            )
    return sorted(set(places.values()))


def safetensors_header(path: Path) -> dict[str, Any]:
    """What a safetensors file begins with: its tensors by name, each with its `dtype`, `shape` and `data_offsets`, and
    `__metadata__`. Raises ModelError for one that is damaged, or begins with more than MAX_HEADER_BYTES."""
    return safetensors_places(path)[0]


def safetensors_places(path: Path) -> tuple[dict[str, Any], int]:
    """`safetensors_header`, and the place in the file from which `data_offsets` count."""
    try:
        check_plain(path, sys.maxsize)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length)) if length <= MAX_HEADER_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path.name} is damaged: its header is no object")
    return header, _LENGTH_BYTES + length


def _is_plain(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and name.isprintable()
        and "/" not in name
        and len(name.encode()) <= MAX_NAME_CHARS
    )
