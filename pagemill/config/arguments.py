"""Flags and keyword arguments, derived from the sections' fields. The only list of settings is `sections.py`."""

import argparse
import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pagemill.config.resolve import Draft, check_values
from pagemill.config.sections import (
    CacheConfig,
    CpuConfig,
    DeviceConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pagemill.errors import ConfigError

ENGINE_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "observability": ObservabilityConfig,
    "device": DeviceConfig,
    "cpu": CpuConfig,
}


class EngineArgs:
    """Settings of an engine as users give them: every field of every engine section, flat, by keyword.

    Raises TypeError for a keyword that no section has, ConfigError for a value of the wrong type or range.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        known = {field.name for cls in ENGINE_SECTIONS.values() for field in dataclasses.fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise TypeError(f"unknown argument {unknown[0]!r}; known: {', '.join(sorted(known))}")
        self.draft = Draft(**{name: make_section(cls, settings) for name, cls in ENGINE_SECTIONS.items()})


def make_section(cls: type, values: Mapping[str, Any]) -> Any:
    """A section from those of `values` that are its fields; None for a field that has a default means the default."""
    hints = typing.get_type_hints(cls)
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
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{field.name}={value!r} is not of type {kind.__name__}")
        chosen[field.name] = value
    section = cls(**chosen)
    check_values(section)
    return section


def _make_nested(name: str, cls: type, values: Mapping[str, Any]) -> Any:
    """The value of a setting that has fields of its own; ConfigErrors name the setting too."""
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"{name}: unknown field {unknown[0]!r}; known: {', '.join(known)}")
    try:
        return make_section(cls, values)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def add_flags(parser: argparse.ArgumentParser, sections: Iterable[type], skip: Iterable[str] = ()) -> None:
    """One `--flag` per field, grouped by section; booleans get `--no-flag` too. Unset flags stay None."""
    for cls in sections:
        group = parser.add_argument_group(cls.__name__, (cls.__doc__ or "").strip())
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in skip:
                continue
            names = [f"--{field.name.replace('_', '-')}", field.metadata["short"]]
            group.add_argument(*filter(None, names), **_flag_options(field, _scalar(hints[field.name])))


def _flag_options(field: "dataclasses.Field[Any]", kind: type) -> dict[str, Any]:
    nested = dataclasses.is_dataclass(kind)
    shown = "" if nested or field.default in (None, dataclasses.MISSING) else f" (default: {field.default})"
    help_text = (field.metadata["help"] + shown).replace("%", "%%")
    options: dict[str, Any] = {"dest": field.name, "default": None, "help": help_text}
    if kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if kind is dict or nested:
        return options | {"type": _json_object, "metavar": "JSON"}
    if field.metadata["choices"]:
        options["choices"] = field.metadata["choices"]
    return options | {"type": kind}


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _scalar(hint: Any) -> type:
    """`int | None` -> int, `dict[str, object]` -> dict."""
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if typing.get_origin(hint) is dict:
        return dict
    return options[0] if options else typing.cast(type, hint)
