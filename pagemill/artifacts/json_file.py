"""JSON objects from a model's folder. Knows nothing about their keys."""

import json
from pathlib import Path
from typing import Any

from pagemill.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ModelError when it is missing, unreadable, or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: not a JSON object")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Like read_json_object, but empty when the file is not there."""
    return read_json_object(path) if path.exists() else {}
