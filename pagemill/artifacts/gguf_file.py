"""The header of a GGUF file: metadata and where each tensor lies, read in one pass over the mapped file.
Knows nothing about what the keys mean, and never reads a weight.

Written against the GGUF v2/v3 layout; vocabularies of 10^5 strings are walked, not decoded, until asked for.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagemill.errors import ModelError
from pagemill.utils.text import shown, shown_name

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_DIMS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_STRING: Final = 8
_ARRAY: Final = 9
# Value type in the file -> little-endian struct code.
_SCALARS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
# Tensor type in the file -> (name, elements per block, bytes per block).
TENSOR_TYPES: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
_LENGTH: Final = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class GgufStrings:
    """An array of strings that is decoded when asked for."""

    raw: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def decode(self) -> list[str]:
        """All strings; bytes that are not UTF-8 become U+FFFD."""
        raw = self.raw
        position = 0
        strings = []
        for _ in range(self.count):
            start = position + 8
            position = start + _LENGTH(raw, position)[0]
            strings.append(raw[start:position].decode("utf-8", "replace"))
        return strings


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as numpy and torch count: (out_features, in_features) for a linear."""
    type_id: int
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int | None
    """None for a tensor type that TENSOR_TYPES does not list."""

    @property
    def type_name(self) -> str:
        """F32, Q4_1, ...; the number for a type that TENSOR_TYPES does not list."""
        return TENSOR_TYPES[self.type_id][0] if self.type_id in TENSOR_TYPES else str(self.type_id)


@dataclass(frozen=True)
class GgufFile:
    """The parsed header of a .gguf file."""

    path: Path
    metadata: dict[str, Any]
    """key -> int, float, bool, str, numpy array (numbers) or GgufStrings."""
    tensors: dict[str, GgufTensor]
    """By name, in file order."""

    def floats(self, tensor: GgufTensor) -> "np.ndarray[Any, Any]":
        """The values of a small tensor of this file as float64. Raises ModelError for one that is not of type F32."""
        if tensor.type_name != "F32" or tensor.num_bytes is None:
            raise ModelError(f"{self.path}: {shown_name(tensor.name)} is of type {tensor.type_name}: it is to be F32")
        with self.path.open("rb") as stream:
            stream.seek(tensor.offset)
            values = np.frombuffer(stream.read(tensor.num_bytes), "<f4").astype(np.float64)
        return values.reshape(tensor.shape)


def read_gguf(path: Path) -> GgufFile:
    """Parse the header. Raises ModelError when the file is missing, not GGUF, truncated or damaged."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelError(f"{path} is not a GGUF file (it does not start with {MAGIC.decode()})")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Reader(path, mapped).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (struct.error, OverflowError, _DamagedError) as error:
        raise ModelError(f"{path} is truncated or damaged: {error}") from error


class _DamagedError(Exception):
    """The bytes cannot be a header."""


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path = path
        self._mapped = mapped
        self._size = len(mapped)
        self._position = len(MAGIC)

    def read(self) -> GgufFile:
        version = self._unpack("<I")
        if version not in _VERSIONS:
            raise ModelError(f"{self._path} has GGUF version {version}; supported: little-endian 2 and 3")
        num_tensors, num_keys = self._unpack("<Q"), self._unpack("<Q")
        # The shortest entry takes 13 bytes: a count beyond that is damage, found before any loop runs on it.
        if (num_tensors + num_keys) * 13 > self._size:
            raise _DamagedError(f"{num_tensors} tensors and {num_keys} keys do not fit in {self._size} bytes")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        return GgufFile(self._path, metadata, self._place(entries, metadata))

    def _place(self, entries: list[GgufTensor], metadata: dict[str, Any]) -> dict[str, GgufTensor]:
        """Turn offsets into file offsets and check that every tensor lies inside the file."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise _DamagedError(f"general.alignment is {shown(alignment)}")
        base = -(-self._position // alignment) * alignment
        placed = {}
        for entry in entries:
            start = base + entry.offset
            end = start + (entry.num_bytes or 0)
            if end > self._size:
                raise _DamagedError(f"tensor {shown_name(entry.name)} ends at byte {end}, the file has {self._size}")
            placed[entry.name] = GgufTensor(entry.name, entry.shape, entry.type_id, start, entry.num_bytes)
        return placed

    def _tensor_entry(self) -> GgufTensor:
        name = self._string()
        num_dims = self._unpack("<I")
        if num_dims > _MAX_DIMS:
            raise _DamagedError(f"tensor {shown_name(name)} has {num_dims} dimensions")
        shape = tuple(reversed([self._unpack("<Q") for _ in range(num_dims)]))
        type_id = self._unpack("<I")
        offset = self._unpack("<Q")
        return GgufTensor(name, shape, type_id, offset, _num_bytes(name, shape, type_id))

    def _unpack(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._mapped, self._position)
        self._position += struct.calcsize(code)
        return value

    def _take(self, num_bytes: int) -> bytes:
        start = self._position
        end = self._position + num_bytes
        if end > self._size:
            raise _DamagedError(f"byte {end} is needed, the file has {self._size}")
        self._position = end
        return self._mapped[start:end]

    def _string(self) -> str:
        return self._take(self._unpack("<Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _DamagedError(f"value type {kind} at byte {self._position} does not exist")
        return self._unpack(_SCALARS[kind])

    def _array(self) -> Any:
        kind = self._unpack("<I")
        count = self._unpack("<Q")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise _DamagedError(f"array type {kind} at byte {self._position} is not supported")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _strings(self, count: int) -> GgufStrings:
        mapped = self._mapped
        start = self._position
        position = start
        for _ in range(count):
            position += 8 + _LENGTH(mapped, position)[0]
        return GgufStrings(self._take(position - start), count)


def _num_bytes(name: str, shape: tuple[int, ...], type_id: int) -> int | None:
    if type_id not in TENSOR_TYPES:
        return None
    type_name, block, block_bytes = TENSOR_TYPES[type_id]
    if shape and shape[-1] % block:
        raise _DamagedError(
            f"tensor {shown_name(name)} has rows of {shape[-1]}, not a multiple of {type_name}'s {block}"
        )
    return math.prod(shape) // block * block_bytes
