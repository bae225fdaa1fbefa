"""Sampling parameters as flags and as words typed in a chat. What they mean is in messages.sampling_params."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from pagemill.errors import RequestError

Params = Mapping[str, Any]
"""Sampling parameters that the user gave, by name; what is absent is left to the model's and the engine's defaults."""

_KINDS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate"),
    "temperature": (float, "0 takes the most likely token; higher is more varied"),
    "top_p": (float, "sample from the most likely tokens that together reach this probability"),
    "top_k": (int, "sample from this many most likely tokens; 0: all"),
    "min_p": (float, "least probability relative to the most likely token"),
    "seed": (int, "the same seed gives the same answer"),
    "stop": (str, "text that ends the answer; may be given more than once"),
}


def add_sampling_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """`--temperature` and so on. Unset flags stay None, unless `defaults` has a value for them."""
    group = parser.add_argument_group("sampling", "Defaults are the model's.")
    for name, (kind, text) in _KINDS.items():
        shown = f" (default: {defaults[name]})" if name in defaults else ""
        options: dict[str, Any] = {"action": "append"} if name == "stop" else {}
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, default=defaults.get(name), help=text + shown, **options)


def given_params(args: argparse.Namespace) -> dict[str, Any]:
    """Parameters that were given as flags. Raises RequestError that names the one that is out of range."""
    params = {name: getattr(args, name) for name in _KINDS if getattr(args, name) is not None}
    check_params(params)
    return params


def parse_param(name: str, text: str) -> Any:
    """The value of one parameter as typed; a list of stop strings is typed as JSON. Raises RequestError."""
    if name not in _KINDS:
        raise RequestError(f"unknown parameter {name!r}; known: {', '.join(_KINDS)}", name)
    if name == "stop":
        return _parse_stop(text)
    kind = _KINDS[name][0]
    try:
        value = kind(text)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise RequestError(f"{name}={text!r} is not {wanted}", name) from None
    check_params({name: value})
    return value


def check_params(params: Params) -> None:
    """Raise RequestError when a value is out of range, whatever the model."""
    from pagemill.messages.sampling_params import SamplingParams  # deferred: msgspec, not needed for --help

    SamplingParams(**params)


def param_names() -> tuple[str, ...]:
    """Names that `parse_param` knows."""
    return tuple(_KINDS)


def _parse_stop(text: str) -> list[str]:
    try:
        value = json.loads(text) if text.startswith("[") else [text]
    except ValueError:
        value = [text]
    check_params({"stop": value})
    return list(value)
