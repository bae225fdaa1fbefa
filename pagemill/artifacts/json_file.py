"""JSON objects from a model's folder. Knows nothing about their keys."""

import json
from pathlib import Path
from typing import Any, Final

from pagemill.artifacts.plain_file import check_plain
from pagemill.errors import ModelError

MAX_BYTES: Final = 64 << 20
"""The index of a model with 100,000 tensors has 10 MB."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ModelError when it is missing, unreadable, or not a JSON object."""
    value = _read(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: not a JSON object")
    return value


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """The list of objects in a file. Raises ModelError like `read_json_object`."""
    value = _read(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelError(f"{path} is damaged: not a list of JSON objects")
    return value


def _read(path: Path) -> Any:
    try:
        check_plain(path, MAX_BYTES)
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Like read_json_object, but empty when the file is not there."""
    return read_json_object(path) if path.exists() else {}
