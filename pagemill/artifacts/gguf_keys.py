"""`GgufKeys`: typed look-ups in the metadata of a GGUF file. Knows no key by name."""

import math
from typing import Any

import numpy as np

from pagemill.artifacts.gguf_file import GgufFile, GgufStrings
from pagemill.errors import ModelError


class GgufKeys:
    """Typed look-ups in a GGUF file's metadata. Every error is a ModelError that names file, key and value."""

    def __init__(self, file: GgufFile) -> None:
        self._path = file.path
        self._metadata = file.metadata

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def has_array(self, key: str) -> bool:
        """Whether there are numbers under `key`, rather than one."""
        return isinstance(self._metadata.get(key), np.ndarray)

    def text(self, key: str, default: str | None = None) -> str:
        """The string under `key`, or `default`. Raises ModelError for anything else."""
        return str(self._get(key, str, "a string", default))

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; of an array whose numbers are all equal (one per layer), that number."""
        value = self._metadata.get(key)
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "iu":
                raise ModelError(f"{self._path}: {key} is an array of {value.dtype}, not an integer")
            if value.size == 0 or (value != value.flat[0]).any():
                raise ModelError(f"{self._path}: {key} differs between layers, which is not supported")
            return int(value.flat[0])
        return int(self._get(key, int, "an integer", default))

    def largest(self, key: str, default: int | None = None) -> int:
        """An integer; of an array, one per layer, the largest."""
        value = self._metadata.get(key)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            return int(value.max())
        return self.integer(key, default)

    def per_layer(self, key: str, count: int, default: int | None = None) -> list[int]:
        """An integer for each of `count` layers, from an array, or one for all. Raises ModelError for fewer."""
        value = self._metadata.get(key)
        if not isinstance(value, np.ndarray):
            return [self.integer(key, default)] * count
        if value.dtype.kind not in "iub" or value.size < count:
            raise ModelError(f"{self._path}: {key} does not hold an integer for each of {count} layers")
        return [int(one) for one in value[:count]]

    def number(self, key: str, default: float | None = None) -> float:
        """The number under `key`, or `default`. Raises ModelError for anything else, NaN and infinity included."""
        value = float(self._get(key, (int, float), "a number", default))
        if not math.isfinite(value):
            raise ModelError(f"{self._path}: {key} is {value}, not a finite number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The boolean under `key`, or `default`. Raises ModelError for anything else."""
        return bool(self._get(key, bool, "a boolean", default))

    def strings(self, key: str) -> list[str]:
        """An array of strings."""
        strings: GgufStrings = self._get(key, GgufStrings, "an array of strings", None)
        return strings.decode()

    def numbers(self, key: str) -> "np.ndarray[Any, Any]":
        """An array of numbers."""
        found: np.ndarray[Any, Any] = self._get(key, np.ndarray, "an array of numbers", None)
        return found

    def _get(self, key: str, kind: type | tuple[type, ...], words: str, default: Any) -> Any:
        value = self._metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self._path} has no key {key}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            shown = repr(value) if isinstance(value, (str, int, float)) else "an array"
            raise ModelError(f"{self._path}: {key} is {shown[:80]}, not {words}")
        return value
