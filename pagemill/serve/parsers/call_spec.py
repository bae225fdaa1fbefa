"""`Marks`: texts of a format with their marks, as formats of structural tags; and the functions that calls are written
of. Does not know what a call is."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pagemill.messages.structured_outputs import CONTROL

Spec = dict[str, Any]
"""A format of a structural tag."""
Item = str | Spec
"""Of a sequence: a text, in which marks may stand, or a format of a structural tag."""
ANY_OBJECT: Final[Spec] = {"type": "json_schema", "json_schema": {"type": "object"}}


class Function(NamedTuple):
    """A function that may be called."""

    name: str
    schema: Mapping[str, Any] | None
    """Of the arguments, which are held to it; None: they may be any object."""
    field: str = "tools"
    """What the request calls its schema, for errors."""
    is_strict: bool = False
    """Whether what of the schema cannot be held is an error."""


class Marks:
    """The marks of a format that are control tokens of the model, and so cannot be written as text."""

    def __init__(self, texts: Iterable[str], token_of: Callable[[str], int | None]) -> None:
        """`token_of`: the id of the control token of this name; None: there is none."""
        found = {text: token_of(text) for text in texts}
        self._ids = {text: token for text, token in found.items() if token is not None}
        longest = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("(" + "|".join(map(re.escape, longest)) + ")") if longest else re.compile("(?!)")

    def __contains__(self, text: str) -> bool:
        return text in self._ids

    def sequence(self, items: Sequence[Item]) -> Spec:
        """The items one after another."""
        elements: list[Spec] = []
        for item in joined(items):
            if isinstance(item, str):
                elements += self._split(item)
            else:
                elements += item["elements"] if item["type"] == "sequence" else [item]
        return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements or [const("")]}

    def trigger(self, text: str) -> bytes:
        """The bytes by which a text is recognized."""
        return self._any.sub(lambda found: f"\0{found[0]}", text).encode().replace(b"\0", CONTROL)

    def first_text(self, text: str) -> str:
        """The text before the first mark that is a token."""
        found = self._any.search(text)
        return text if found is None else text[: found.start()]

    def until(self, end: str) -> Item:
        """Any text up to this, itself included."""
        if end in self._ids:
            return {"type": "sequence", "elements": [{"type": "any_text"}, *self._split(end)]}
        return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}

    def _split(self, text: str) -> list[Spec]:
        parts = self._any.split(text) if self._ids else [text]
        return [self._part(part) for part in parts if part]

    def _part(self, text: str) -> Spec:
        return {"type": "token", "token": self._ids[text]} if text in self._ids else const(text)


def json_arguments(function: Function) -> Spec:
    """Arguments as a JSON object."""
    if function.schema is None:
        return ANY_OBJECT
    return {"type": "json_schema", "json_schema": {"type": "object", **function.schema}}


def either(specs: Sequence[Spec]) -> Spec:
    """One of several."""
    return specs[0] if len(specs) == 1 else {"type": "or", "elements": list(specs)}


def after_triggers(tags: Sequence[tuple[str, Spec]]) -> Spec:
    """One of several formats, each after a text of its own, before which any text may stand."""
    return {
        "type": "triggered_tags",
        "triggers": list(dict.fromkeys(trigger for trigger, _ in tags)),
        "tags": [{"begin": trigger, "content": rest, "end": ""} for trigger, rest in tags],
        "at_least_one": True,
        "stop_after_first": True,
    }


def joined(items: Iterable[Item]) -> list[Item]:
    """The same items; texts beside each other are one, and empty ones left out."""
    found: list[Item] = []
    for item in items:
        if isinstance(item, str) and found and isinstance(last := found[-1], str):
            found[-1] = last + item
        elif item != "":
            found.append(item)
    return found


def const(text: str) -> Spec:
    return {"type": "const_string", "value": text}
