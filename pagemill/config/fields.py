"""`setting()`: a dataclass field that carries its help text and its allowed values."""

import dataclasses
from typing import Any


def setting(
    default: Any, help: str, *, choices: tuple[str, ...] = (), low: float | None = None, short: str | None = None
) -> Any:
    """A field of a section. `help` becomes the flag's help; `choices` and `low` are checked by `resolve`; `short` is
    a second name of the flag."""
    metadata = {"help": help, "choices": choices, "low": low, "short": short}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
