"""Rare calls by name, typed by a protocol class: which methods there are, and what travels, follow from it.

For values whose type may be a subclass of the declared one (a `KVCacheSpec`), which the codec of the hot path does
not know. Plain Python, slow, and strict; knows nothing about who calls.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from pagemill.errors import TransportError


class CallCodec:
    """Arguments and results of a protocol's methods as plain values, and back. `excluded` methods do not exist.

    Packing raises ValueError for a method that does not exist or arguments that do not fit. Unpacking raises
    TransportError, and nothing else.
    """

    def __init__(self, protocol: type, excluded: Collection[str] = ()) -> None:
        self._hints: dict[str, tuple[list[Any], Any]] = {}
        for name, function in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_") and name not in excluded:
                hints = typing.get_type_hints(function)
                result = hints.pop("return")
                self._hints[name] = (list(hints.values()), result)

    def pack_args(self, method: str, args: Sequence[Any]) -> list[Any]:
        """Plain values for the arguments of a call."""
        if method not in self._hints:
            raise ValueError(f"unknown method {method!r}; known: {', '.join(self._hints)}")
        wanted = len(self._hints[method][0])
        if len(args) != wanted:
            raise ValueError(f"{method} takes {wanted} arguments, not {len(args)}")
        return [_pack(value) for value in args]

    def unpack_args(self, method: str, values: Sequence[Any]) -> list[Any]:
        """The arguments of a call."""
        hints = self._of(method)[0]
        if len(values) != len(hints):
            raise TransportError(f"{method} takes {len(hints)} arguments, not {len(values)}")
        return [_unpack_checked(hint, value, method) for hint, value in zip(hints, values, strict=True)]

    def pack_result(self, value: Any) -> Any:
        """A plain value for what a method returned."""
        return _pack(value)

    def unpack_result(self, method: str, value: Any) -> Any:
        """What a method returned."""
        return _unpack_checked(self._of(method)[1], value, method)

    def _of(self, method: str) -> tuple[list[Any], Any]:
        if method not in self._hints:
            raise TransportError(f"unknown method {method[:64]!r}; known: {', '.join(self._hints)}")
        return self._hints[method]


def _pack(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _pack(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return [type(value).__name__, fields]
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_pack(item) for item in value]
    return value


def _unpack_checked(hint: Any, value: Any, method: str) -> Any:
    try:
        return _unpack(hint, value)
    except Exception as error:  # whatever foreign values provoke is one kind of error to a receiver
        raise TransportError(f"a value of {method} cannot be read: {type(error).__name__}: {error}") from error


def _unpack(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _unpack_dataclass(hint, value)
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _unpack_union(arguments, value)
    if origin is tuple:
        items = msgspec.convert(value, list[Any])
        is_open = len(arguments) == 2 and arguments[1] is Ellipsis
        hints = [arguments[0]] * len(items) if is_open else arguments
        return tuple(_unpack(item_hint, item) for item_hint, item in zip(hints, items, strict=True))
    if origin in (list, set, frozenset):
        return origin(_unpack(arguments[0], item) for item in msgspec.convert(value, list[Any]))
    if origin is dict:
        pairs = msgspec.convert(value, dict[Any, Any]).items()
        return {_unpack(arguments[0], key): _unpack(arguments[1], item) for key, item in pairs}
    return msgspec.convert(value, hint)


def _unpack_dataclass(declared: type, value: Any) -> Any:
    name, values = msgspec.convert(value, tuple[str, dict[str, Any]])
    kinds = {kind.__name__: kind for kind in _with_subclasses(declared) if not inspect.isabstract(kind)}
    if name not in kinds:
        raise ValueError(f"{name[:64]!r} is not a {declared.__name__}; known: {', '.join(kinds)}")
    hints = typing.get_type_hints(kinds[name])
    names = [field.name for field in dataclasses.fields(kinds[name])]
    if set(values) != set(names):
        raise ValueError(f"{name} has the fields {', '.join(names)}")
    return kinds[name](**{key: _unpack(hints[key], values[key]) for key in names})


def _unpack_union(hints: Sequence[Any], value: Any) -> Any:
    problems = []
    for hint in hints:
        try:
            return _unpack(hint, value)
        except (ValueError, TypeError) as error:
            problems.append(str(error))
    raise ValueError("; ".join(problems))


def _with_subclasses(kind: type[Any]) -> list[type[Any]]:
    children: list[type[Any]] = kind.__subclasses__()
    return [kind, *(found for child in children for found in _with_subclasses(child))]
