"""Flags and keyword arguments, derived from the sections' fields. They are the only list of settings."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Any, Self

from pagemill.config.fields import check_values
from pagemill.config.flag_words import number_or
from pagemill.config.nested_flags import LayOver, add_nested_flags, json_object
from pagemill.config.no_effect import CompatConfig
from pagemill.config.refused_settings import check_settings
from pagemill.config.sections import EngineSettings
from pagemill.errors import ConfigError

ENGINE_SECTIONS: dict[str, type] = typing.get_type_hints(EngineSettings)
"""Name of a section -> its class, as users ask for it."""


class EngineArgs:
    """Settings of an engine as users give them: every field of every engine section, flat, by keyword, and those of
    `CompatConfig`, which change nothing.

    Raises TypeError for a keyword that nobody knows, ConfigError for one of vLLM that has no counterpart, and for a
    value of the wrong type or range.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        known = setting_names()
        settings = check_settings(settings)
        unknown = sorted(set(settings) - known)
        if unknown:
            raise TypeError(f"unknown argument {unknown[0]!r}; known: {', '.join(sorted(known))}")
        make_section(CompatConfig, settings)
        self.given = frozenset(name for name, value in settings.items() if value is not None)
        """Names of the settings that the user gave."""
        self.settings = EngineSettings(**{name: make_section(cls, settings) for name, cls in ENGINE_SECTIONS.items()})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one flag for each setting to a parser of one's own, and return it. Unset flags stay None."""
        add_flags(parser, (*ENGINE_SECTIONS.values(), CompatConfig))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The settings that a parser found; what it found besides is somebody else's. Raises ConfigError for a value of
        the wrong type or range."""
        return cls(**{name: value for name, value in vars(args).items() if name in setting_names()})


def setting_names() -> set[str]:
    """The keywords that `EngineArgs` takes: the names of all settings."""
    return {field.name for cls in (*ENGINE_SECTIONS.values(), CompatConfig) for field in dataclasses.fields(cls)}


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a section's fields; many sections of few classes are made."""
    return typing.get_type_hints(cls)


def make_section(cls: type, values: Mapping[str, Any]) -> Any:
    """A section from those of `values` that are its fields; None for a field that has a default means the default."""
    hints = _hints(cls)
    chosen = {}
    for field in dataclasses.fields(cls):
        value = values.get(field.name)
        if value is None:
            continue
        kind = _scalar(hints[field.name])
        if kind is float and isinstance(value, int):
            value = float(value)
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            value = _make_nested(field.name, kind, value)
        if kind is tuple and isinstance(value, (list, tuple)):
            value = _make_tuple(field.name, hints[field.name], value)
        if field.metadata["choices"] and isinstance(value, str):
            value = _as_listed(value, field.metadata["choices"])
        if issubclass(kind, Enum):
            value = _as_member(field, kind, value)
        worded = isinstance(value, str) and bool(field.metadata["words"])  # `check_values` knows which words
        if not (isinstance(value, kind) or worded) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{field.name}={value!r} is not of type {section_title(kind)}")
        chosen[field.name] = value
    section = cls(**chosen)
    check_values(section)
    return section


def _make_tuple(name: str, hint: Any, values: Iterable[Any]) -> tuple[Any, ...]:
    """Raises ConfigError for an element of another type than the hint's."""
    kind = item_kind(hint)
    if kind is float:
        values = [float(value) if type(value) is int else value for value in values]
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{name}: {value!r} is not of type {kind.__name__}")
    return tuple(values)


def _as_listed(value: str, choices: tuple[str, ...]) -> str:
    """The choice that differs in case only; the value where there is none."""
    return next((choice for choice in choices if choice.lower() == value.lower()), value)


def _as_member(field: "dataclasses.Field[Any]", kind: type[Enum], value: Any) -> Enum:
    """Raises ConfigError for what is no member's value."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{field.name}={value!r} is not one of {', '.join(field.metadata['choices'])}") from None


def _make_nested(name: str, cls: type, values: Mapping[str, Any]) -> Any:
    """The value of a setting that has fields of its own; ConfigErrors name the setting too."""
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(values) - set(known))
    refused: Mapping[str, str] = getattr(cls, "REFUSED", {})
    if unknown and unknown[0] in refused:
        raise ConfigError(f"{name}: {unknown[0]} is not supported: {refused[unknown[0]]}")
    if unknown:
        raise ConfigError(f"{name}: unknown field {unknown[0]!r}; known: {', '.join(known)}")
    try:
        return make_section(cls, values)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def add_flags(parser: argparse.ArgumentParser, sections: Iterable[type], skip: Iterable[str] = ()) -> None:
    """One `--flag` per field, grouped by section; booleans get `--no-flag` too. Unset flags stay None. A second name
    that the command has given to something else already (`chat -q`) is left out."""
    for cls in sections:
        group = parser.add_argument_group(section_title(cls), (cls.__doc__ or "").strip())
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in skip:
                continue
            names = [f"--{field.name.replace('_', '-')}", *filter(None, [field.metadata["short"]])]
            kind = _scalar(hints[field.name])
            if dataclasses.is_dataclass(kind):
                add_nested_flags(group, names, field.name, kind, field.metadata["help"])
                continue
            options = _flag_options(field, kind, hints[field.name])
            try:
                group.add_argument(*names, **options)
            except argparse.ArgumentError:
                group.add_argument(names[0], **options)


def section_title(section: type) -> str:
    """What users know it by: the name of what runs, also where what is asked for has a class of its own."""
    return section.__name__.replace("Settings", "Config")


def _flag_options(field: "dataclasses.Field[Any]", kind: type, hint: Any) -> dict[str, Any]:
    shown = "" if field.default in (None, dataclasses.MISSING) else f" (default: {field.default})"
    help_text = (field.metadata["help"] + shown).replace("%", "%%")
    options: dict[str, Any] = {"dest": field.name, "default": None, "help": help_text}
    if kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if kind is dict:
        return options | {"type": json_object, "metavar": "JSON", "action": LayOver}
    if kind is tuple:
        return options | {"type": item_kind(hint), "nargs": "+", "action": "extend"}
    if field.metadata["choices"]:
        options["choices"] = field.metadata["choices"]
    if kind is int:
        return options | {"type": number_or(field.metadata["words"])}
    return options | {"type": str if issubclass(kind, str) else kind}


def _scalar(hint: Any) -> type:
    """`int | None` -> int, `dict[str, object]` -> dict, `tuple[int, ...] | None` -> tuple."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    return typing.cast(type, typing.get_origin(hint) or hint)


def item_kind(hint: Any) -> type:
    """`tuple[int, ...] | None` -> int."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    return typing.cast(type, typing.get_args(hint)[0])
