"""Finding where JSON values end in a text that arrives in pieces. Values are not checked here, but for their ends."""

import re
from enum import Enum, auto
from typing import Any, Final

from pydantic_core import from_json

BREAK: Final = "\udc00"
"""Breaks marks that are text (`token_marks.py`). A lone surrogate: decoded text has none."""
_IN_STRING: Final = re.compile(r'[^"\\]*')
_STRING_STOP: Final = re.compile(r'["\\]')
_IN_CONTAINER: Final = re.compile(r'[^"{}\[\]<]*')
_IN_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]*")


class Scan(Enum):
    """Where a scan stands."""

    OPEN = auto()
    """The value goes on."""
    ENDED = auto()
    FAILED = auto()
    """This is no JSON value."""


class ValueScan:
    """One value. Text that cannot be JSON, such as the `<` of a marker outside of a string, is not passed."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_is_scalar", "status")

    def __init__(self, first: str) -> None:
        """`first` is the value's first character, which is not fed again."""
        self._depth = 1 if first in "{[" else 0
        self._in_string = first == '"'
        self._is_scalar = not self._depth and not self._in_string
        self._escaped = False
        self.status = Scan.OPEN if not self._is_scalar or _IN_SCALAR.fullmatch(first) else Scan.FAILED

    def feed(self, text: str, at: int) -> int:
        """Read on from a place in a text; the place up to which it belongs to the value."""
        if self._in_string and not self._escaped and _STRING_STOP.search(text, at) is None:
            return len(text)
        while self.status is Scan.OPEN and at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._in_string:
                at = self._pass_string(text, at)
            elif self._is_scalar:
                at = _end(_IN_SCALAR, text, at)
                if at < len(text):
                    self.status = Scan.ENDED
            else:
                at = self._pass_container(text, at)
        return at

    def _pass_string(self, text: str, at: int) -> int:
        at = _end(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            if not self._depth:
                self.status = Scan.ENDED
        return at + 1

    def _pass_container(self, text: str, at: int) -> int:
        at = _end(_IN_CONTAINER, text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == "<":
            self.status = Scan.FAILED
            return at
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            if not self._depth:
                self.status = Scan.ENDED
        return at + 1


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested too deeply."""
    return from_json(text.replace(BREAK, ""), allow_inf_nan=False)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(parsed(text), dict)
    except ValueError:
        return False


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a match ends; the pattern may match nothing."""
    match = pattern.match(text, at)
    return at if match is None else match.end()
