"""`Fields`: an object in a file of a stranger, read field by field, and `Names`: layers by name or pattern, as such
files list them. Knows no format."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.errors import ModelError
from pagemill.model.quantization.pattern_steps import num_steps
from pagemill.utils.text import shown

MAX_PATTERNS = 200
MAX_STEPS = 1 << 21
"""Of all patterns together, for one name."""
_MAX_PATTERN = 200
_MAX_REPEATS = 3
_MAX_STEPS_EACH = 1 << 20


class Fields:
    """The fields of an object in config.json; every error is a ModelError that names the field."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A value of a type; None where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ModelError(f"{self.name}.{key}={shown(value)} is of a wrong type")
        return value

    def choose(self, key: str, allowed: tuple[Any, ...]) -> Any:
        """One of the values that are supported."""
        value = self.values.get(key)
        if not any(type(value) is type(one) and value == one for one in allowed):
            known = ", ".join(str(one) for one in allowed if one is not None)
            raise ModelError(f"{self.name}.{key}={shown(value)} is not supported; supported: {known}")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings; empty where there is none."""
        value = self.get(key, list) or []
        if not all(isinstance(one, str) for one in value):
            raise ModelError(f"{self.name}.{key}={shown(value)} is not a list of strings")
        return list(value)

    def positive(self, key: str) -> int:
        """A number above 0."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.name}.{key}={shown(value)} is not a positive number")
        return value

    def size(self, key: str) -> int | None:
        """Inputs of a group; None for -1, which is all of an output's."""
        return None if self.values.get(key) == -1 else self.positive(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, bool)
        return default if value is None else bool(value)

    def inside(self, key: str) -> "Fields":
        """An object in this one; empty where there is none."""
        return Fields(f"{self.name}.{key}", self.get(key, dict) or {})

    def refuse(self, key: str) -> None:
        """What must not be there."""
        value = self.values.get(key)
        if value:
            raise ModelError(f"{self.name}.{key}={shown(value)} is not supported")


class Names:
    """Names of layers, and patterns of names."""

    def __init__(self, targets: list[str]) -> None:
        """Raises ModelError for a pattern that is damaged, or could take long."""
        self.exact = frozenset(target for target in targets if not target.startswith("re:"))
        self.patterns = [_compiled(target[3:]) for target in targets if target.startswith("re:")]
        self.num_steps = sum(num_steps(pattern.pattern) for pattern in self.patterns)
        """That matching a name may take."""

    def has(self, name: str) -> bool:
        """Whether the name is one of them."""
        return name in self.exact or any(pattern.match(name) for pattern in self.patterns)


def check_steps(listed: Sequence[Names]) -> None:
    """Raises ModelError where matching a name with all of their patterns could take long."""
    if sum(names.num_steps for names in listed) > MAX_STEPS:
        num_patterns = sum(len(names.patterns) for names in listed)
        raise ModelError(f"the {num_patterns} patterns in quantization_config could take long to match")


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern out of a file: one that repeats a group, or repeats anything often, could take for ever to match."""
    repeats = len(re.findall(r"[*+]|\{\d*,", pattern))
    if len(pattern) > _MAX_PATTERN or repeats > _MAX_REPEATS or re.search(r"\)[*+{]|\\[1-9]|\(\?[^:]", pattern):
        raise _long(pattern)
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"the pattern {pattern[:80]!r} in quantization_config is damaged: {error}") from error
    if num_steps(pattern) > _MAX_STEPS_EACH:
        raise _long(pattern)
    return compiled


def _long(pattern: str) -> ModelError:
    return ModelError(f"the pattern {pattern[:80]!r} in quantization_config could take long to match")
