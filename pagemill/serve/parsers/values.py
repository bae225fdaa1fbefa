"""`ValueWriter`: the value of an argument, from text as it stands between two marks to JSON, while it arrives."""

from json.encoder import encode_basestring
from typing import Any, Final

from pagemill.serve.parsers.json_scan import parsed

NULL: Final = "null"
_PYTHON: Final = {"True": "true", "False": "false", "None": NULL}
"""Literals of Python, which some templates write, and what they are in JSON."""


def escaped(text: str) -> str:
    """A text as it stands in a JSON string, without the quotes."""
    return encode_basestring(text)[1:-1]


class ValueWriter:
    """One value. A string is passed on as it arrives; anything else when it is whole, as the text that it is, for a
    number must not be written anew."""

    __slots__ = ("_begun", "_held", "_held_chars", "_streams", "_types")

    def __init__(self, types: frozenset[str]) -> None:
        """`types`: JSON types that the value may have; empty: nothing is known."""
        self._types = types
        self._streams = bool(types) and types <= {"string", NULL}
        self._held: list[str] = []
        self._held_chars = 0
        self._begun = False

    def feed(self, text: str) -> str:
        """The next characters of the JSON."""
        if not text:
            return ""
        if self._begun:
            return escaped(text)
        self._held.append(text)
        self._held_chars += len(text)
        if not self._streams or (NULL in self._types and self._held_chars <= len(NULL)):
            return ""
        return self._begin()

    def end(self) -> str:
        """The rest of the JSON."""
        if self._begun:
            return '"'
        text = "".join(self._held)
        if self._streams:
            return text if text == NULL and NULL in self._types else self._begin() + '"'
        stripped = text.strip()
        if "boolean" in self._types or NULL in self._types or not self._types:
            stripped = _PYTHON.get(stripped, stripped)
        return stripped if self._is_json(stripped) else self._begin() + '"'

    def _begin(self) -> str:
        """What was held back, as the beginning of a string."""
        self._begun = True
        return '"' + escaped("".join(self._held))

    def _is_json(self, text: str) -> bool:
        """Whether a text is JSON of a type that the value may have."""
        try:
            value = parsed(text)
        except ValueError:
            return False
        if "string" in self._types or not self._types:
            return not isinstance(value, str) and (not self._types or _fits(value, self._types))
        return True


def _fits(value: Any, types: frozenset[str]) -> bool:
    match value:
        case None:
            return NULL in types
        case bool():
            return "boolean" in types
        case int():
            return "integer" in types or "number" in types
        case float():
            return "number" in types
        case list():
            return "array" in types
        case _:
            return "object" in types
