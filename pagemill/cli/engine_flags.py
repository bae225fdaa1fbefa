"""From parsed flags to `EngineArgs` and `ServerConfig`. The settings themselves are the fields of `EngineSettings`."""

import argparse
from collections.abc import Iterable
from typing import Any

from pagemill.config.arguments import ENGINE_SECTIONS, EngineArgs, add_flags, setting_names
from pagemill.config.no_effect import CompatConfig


def add_engine_flags(parser: argparse.ArgumentParser, skip: Iterable[str] = ()) -> None:
    """One flag per setting of the engine, except the fields in `skip`."""
    add_flags(parser, (*ENGINE_SECTIONS.values(), CompatConfig), skip)


def given_settings(args: argparse.Namespace, skip: Iterable[str] = ()) -> dict[str, Any]:
    """Engine settings that were given on the command line: field -> value."""
    names = setting_names() - set(skip)
    return {name: value for name, value in vars(args).items() if name in names and value is not None}


def engine_args(args: argparse.Namespace, skip: Iterable[str] = ()) -> EngineArgs:
    """The engine's settings. Raises ConfigError for a value of the wrong type or range."""
    return EngineArgs(**given_settings(args, skip))
