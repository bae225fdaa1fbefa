"""`--config FILE`: flags of a command from a YAML file. What the command line gives goes before the file.

Knows how a file spells flags; which there are, and what they take, is known by the command's parser.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagemill.cli.errors import UsageError
from pagemill.config.refused_settings import asks_for_nothing, refusal_of

MAX_BYTES = 1 << 20
_MODEL_NAMES = ("model", "model_tag")
"""Of the positional argument too."""


class ConfigFile(argparse.Action):
    """Reads the file, and keeps what its flags mean; `with_file` lays it under what was given besides."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Raises UsageError, which names the file, for what a command line could not say either."""
        try:
            found = parser.parse_args(flag_words(parser, read_flags(Path(values))))
        except UsageError as error:  # of `Parser.error`, or of a file that is wrong in itself
            raise UsageError(f"{values}: {error}") from None
        setattr(namespace, self.dest, found)


def with_file(args: argparse.Namespace) -> argparse.Namespace:
    """The flags of the command line, and where it gives none those of its file."""
    file = args.config
    if file is None:
        return args
    given = {name: value for name, value in vars(args).items() if value is not None}
    if "model_argument" in given:
        given.setdefault("model", given["model_argument"])
    return argparse.Namespace(**(vars(file) | given))


def read_flags(path: Path) -> dict[str, Any]:
    """Name of a flag, with underscores -> its value. Raises UsageError for a file that cannot be read or holds anything
    else."""
    import yaml  # deferred: few commands have a file

    try:
        text = path.read_bytes()
        if len(text) > MAX_BYTES:
            raise UsageError(f"has {len(text)} bytes; at most {MAX_BYTES} are read")
        found = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"is not YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError("is not a list of flags, such as max-model-len: 4096, one a line")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def flag_words(parser: argparse.ArgumentParser, flags: dict[str, Any]) -> list[str]:
    """As a command line would say it. A refused setting that asks for nothing is left out."""
    words: list[str] = []
    for name, value in flags.items():
        flag = _flag("model" if name in _MODEL_NAMES else name)
        known = flag.partition(".")[0] in parser._option_string_actions
        if value is None or (not known and asks_for_nothing(name, value)):
            continue
        if name == "config" or not known:
            raise UsageError(
                refusal_of(flag) or f"{name!r} is no flag that a file can have; see '{parser.prog} --help'"
            )
        words += _words(parser, flag, value)
    return words


def _words(parser: argparse.ArgumentParser, flag: str, value: Any) -> Iterator[str]:
    if value is True:
        yield flag
    elif value is False:
        yield f"--no-{flag.removeprefix('--')}"
    elif isinstance(value, list) and _takes_several(parser, flag):
        yield flag
        yield from map(str, value)
    elif isinstance(value, (dict, list)):
        yield f"{flag}={json.dumps(value, default=str)}"
    else:
        yield f"{flag}={value}"


def _takes_several(parser: argparse.ArgumentParser, flag: str) -> bool:
    action = parser._option_string_actions.get(flag)
    return action is not None and action.nargs == "+"


def _flag(name: str) -> str:
    field, dot, path = name.partition(".")
    return f"--{field.replace('_', '-')}{dot}{path}"
