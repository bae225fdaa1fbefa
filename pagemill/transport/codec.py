"""Messages to frames and back: one msgpack body, and a frame of its own for each large array.

Knows nothing about how frames travel. Structs, dataclasses and numpy arrays of a few number types; nothing else is
encoded, and nothing that arrives is executed.
"""

import functools
import math
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pagemill.errors import TransportError

T = TypeVar("T")
Frame = bytes | bytearray | memoryview
Array = npt.NDArray[Any]

ARRAY_TYPES = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    )
}
_NAMES = {dtype: name for name, dtype in ARRAY_TYPES.items()}  # numpy makes dtype.name anew each time, slowly
MAX_DIMENSIONS = 8
INLINE_BYTES = 4096
"""Arrays up to this size travel inside the body: a frame of its own costs more than copying them. So do those for
which there is no frame left."""


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts. Larger input is refused before it is decoded."""

    max_frames: int = 1024
    max_frame_bytes: int = 1 << 30
    max_message_bytes: int = 1 << 31


DEFAULT_LIMITS = Limits()
NETWORK_LIMITS = Limits(max_frame_bytes=1 << 24, max_message_bytes=1 << 26)
"""What a server takes over tcp: a connection that proves nothing may announce one frame before it is hung up."""


class _ArrayWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data: bytes | int
    """The elements, or the number of the frame that holds them."""


class Codec(Generic[T]):
    """Encodes and decodes messages of one type, or of a union of tagged Structs. Thread-safe.

    `encode` returns frames: the body first, then one frame per large array, which is a view of the array (it must not
    change until the frames are sent). `decode` checks everything against the declared type: field types, number types
    of arrays, and shapes against byte counts; whatever is wrong is a TransportError. Decoded arrays are writable:
    views of writable frames, copies of others.
    """

    def __init__(
        self,
        message_type: Any,
        limits: Limits = DEFAULT_LIMITS,
        named: Mapping[type[dict[str, Any]], Callable[[str], Any]] | None = None,
    ) -> None:
        """`named`: subclasses of dict, and for each what gives the type of a value by its name; it may raise."""
        self._limits = limits
        self._named = named or {}
        self._lock = threading.Lock()
        self._frames: list[Frame] = []
        self._used: set[int] = set()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_other)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type, dec_hook=self._decode_other)

    def encode(self, message: T) -> list[Frame]:
        """Frames of a message. Raises TypeError for what messages may not contain."""
        with self._lock:
            frames: list[Frame] = [b""]
            self._frames = frames
            frames[0] = self._encoder.encode(message)
            self._frames = []
        return frames

    def decode(self, frames: Sequence[Frame]) -> T:
        """The message in these frames. Raises TransportError, and nothing else, when they do not hold one."""
        check_limits([memoryview(frame).nbytes for frame in frames], self._limits)
        with self._lock:
            self._frames = list(frames)
            self._used.clear()
            try:
                message = self._decoder.decode(frames[0])
            except Exception as error:  # whatever foreign bytes provoke is one kind of error to a receiver
                raise TransportError(f"a message cannot be decoded: {type(error).__name__}: {error}") from error
            finally:
                self._frames = []
            if len(self._used) != len(frames) - 1:
                raise TransportError(f"a message has {len(frames) - 1} array frames and refers to {len(self._used)}")
        return message

    def _encode_other(self, value: Any) -> _ArrayWire:
        name = _NAMES.get(value.dtype) if isinstance(value, np.ndarray) else None
        if name is None:
            kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(f"a message holds a value that cannot travel: {kind}")
        shape = list(value.shape)
        if value.nbytes <= INLINE_BYTES or len(self._frames) >= self._limits.max_frames:
            return _ArrayWire(name, shape, value.tobytes())
        flat = np.ascontiguousarray(value).reshape(-1)
        self._frames.append(flat.view(np.uint8).data)
        return _ArrayWire(name, shape, len(self._frames) - 1)

    def _decode_other(self, hint: Any, value: Any) -> Array | dict[str, Any]:
        if hint in self._named:
            return self._decode_named(hint, value)
        if hint is not np.ndarray and typing.get_origin(hint) is not np.ndarray:
            raise ValueError(f"{hint} cannot travel in a message")
        wire = msgspec.convert(value, _ArrayWire)
        data = self._take_frame(wire.data) if isinstance(wire.data, int) else bytearray(wire.data)
        return decode_array(wire.dtype, wire.shape, data, expected=_element_type(hint))

    def _decode_named(self, kind: type[dict[str, Any]], value: Any) -> dict[str, Any]:
        type_of = self._named[kind]
        plain = msgspec.convert(value, dict[str, Any])
        return kind(
            {name: msgspec.convert(each, type_of(name), dec_hook=self._decode_other) for name, each in plain.items()}
        )

    def _take_frame(self, number: int) -> Frame:
        if not 0 < number < len(self._frames) or number in self._used:
            raise ValueError(f"array frame {number} of {len(self._frames) - 1} does not exist or is used twice")
        self._used.add(number)
        return self._frames[number]


def check_limits(frame_sizes: Sequence[int], limits: Limits) -> None:
    """Raise TransportError when a message of frames of these sizes (bytes) is empty or larger than allowed."""
    if not 0 < len(frame_sizes) <= limits.max_frames:
        raise TransportError(f"a message of {len(frame_sizes)} frames; 1 to {limits.max_frames} are allowed")
    largest = max(frame_sizes)
    total = sum(frame_sizes)
    if largest > limits.max_frame_bytes or total > limits.max_message_bytes:
        raise TransportError(
            f"a message of {total} bytes, the largest frame {largest}; "
            f"{limits.max_message_bytes} and {limits.max_frame_bytes} are allowed"
        )


def decode_array(name: str, shape: Sequence[int], data: Frame, expected: "np.dtype[Any] | None" = None) -> Array:
    """An array of `shape` over `data`, which is copied if it is read-only. Raises ValueError."""
    dtype = ARRAY_TYPES.get(name)
    if dtype is None or (expected is not None and dtype != expected):
        raise ValueError(f"an array of {name[:32]!r}; expected {expected or ', '.join(ARRAY_TYPES)}")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise ValueError(f"an array of {len(shape)} dimensions, shape {list(shape[:MAX_DIMENSIONS])}")
    view = memoryview(data)
    if math.prod(shape) * dtype.itemsize != view.nbytes:
        raise ValueError(f"an array of {name} with shape {list(shape)} in {view.nbytes} bytes")
    if dtype == np.bool_ and view.nbytes and np.frombuffer(view, np.uint8).max() > 1:
        raise ValueError("an array of bool with bytes that are neither 0 nor 1")
    array = np.frombuffer(bytearray(view) if view.readonly else view, dtype)
    return array.reshape(shape)


@functools.cache
def _element_type(hint: Any) -> "np.dtype[Any] | None":
    """np.dtype of NDArray[np.int32]; None where the declaration leaves it open."""
    arguments = typing.get_args(hint)
    scalars = typing.get_args(arguments[1]) if len(arguments) == 2 else ()
    is_number = bool(scalars) and isinstance(scalars[0], type) and issubclass(scalars[0], np.generic)
    return np.dtype(scalars[0]) if is_number and scalars[0] is not np.generic else None
