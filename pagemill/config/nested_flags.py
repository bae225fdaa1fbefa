"""Flags of a setting that has fields of its own: as a JSON object, or field by field as `--setting.field value`.

Knows how values are written on a command line; `arguments` knows what a setting allows.
"""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """The type of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON, such as {_example(text)}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _example(text: str) -> str:
    """What `image=2,video=1` would be as a JSON object; any object for another text."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip().isidentifier() and equals for name, equals, _ in pairs):
        return '{"name": 1}'
    return json.dumps({name.strip(): int(value) if value.strip().isdecimal() else value for name, _, value in pairs})


def add_nested_flags(group: Any, names: Sequence[str], dest: str, section: type, help_text: str) -> None:
    """`names` take a JSON object, `NAME.FIELD` one field of it. All given are laid over each other, in their order."""
    group.add_argument(*names, dest=dest, action=LayOver, type=json_object, metavar="JSON", help=help_text)
    for path, kind in _fields(section):
        dotted = [f"{name}.{'.'.join(path)}" for name in names]
        group.add_argument(*dotted, dest=dest, action=LayOver, type=_reader(kind), path=path, help=argparse.SUPPRESS)


def _fields(section: type, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """(path, hint) of every field, those of settings inside included."""
    hints = typing.get_type_hints(section)
    found: list[tuple[tuple[str, ...], Any]] = []
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        inner = _fields(hint, (*path, field.name)) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else []
        found += [((*path, field.name), hint), *inner]
    return found


def _reader(hint: Any) -> Any:
    """Text is taken as it is where the field is one; everything else is JSON, and `1,2,4` a list."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = any(isinstance(kind, type) and issubclass(kind, str) for kind in kinds)

    def value(text: str) -> Any:
        if plain:
            return text
        try:
            return json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except json.JSONDecodeError:
            return _list(text)

    return value


def _list(text: str) -> Any:
    """Numbers between commas; else the text, whose type is then wrong for the field."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().isdecimal() for part in parts) else text


class LayOver(argparse.Action):
    """Lays an object, or one field, over what was given before."""

    def __init__(self, *args: Any, path: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self._path = path

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        for name in reversed(self._path):
            values = {name: values}
        setattr(namespace, self.dest, _laid_over(getattr(namespace, self.dest) or {}, values))


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _laid_over(merged[name], value) if both else value
    return merged
