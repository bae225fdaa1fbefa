"""Whether a regular expression of a tokenizer may backtrack for very long on a short text.

The engine of `tokenizers` gives up one attempt to match after ten million steps, and begins another one at the next
character, so that a few kilobytes may take hours. What is looked at is how an expression is built: repeats of parts
that match in several ways take exponential time, and two repeats in a row before something that may fail, cubic time.
The expressions of models have neither. An expression that is not understood is taken for one of these.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import tokenizers

MANY: Final = 8
"""Repeats of a part that matches in several ways, from which on they are too many."""
LONG: Final = 64
"""Repeats of a character that count like any number of them."""
MOST_OPEN: Final = 1
"""Repeats that may be in doubt at once."""
MAX_DEPTH: Final = 40
_QUANTIFIER: Final = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[+?]?")
_ESCAPE: Final = re.compile(
    r"\\(?:[pP]\{[^}]*\}|x\{[0-9A-Fa-f ]*\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|[^kg1-9])", re.DOTALL
)
_OPENING: Final = re.compile(r"\(\?(?:[imxsaudlL-]*:|<?[=!]|>)|\((?!\?)")
_FLAGS: Final = re.compile(r"\(\?[imxsaudlL-]*\)")
_COMMENT: Final = re.compile(r"\(\?#[^)]*\)")


class _NotUnderstoodError(Exception):
    """There is something in the expression that this module does not know, or a repeat of what is ambiguous."""


@dataclass(frozen=True)
class _Part:
    """A piece of an expression."""

    open_inside: int = 0
    """Repeats in it that are in doubt while what follows may still fail."""
    open_alone: int = 0
    """The same, where nothing follows."""
    ambiguous: bool = False
    """Whether it may match the same text in several ways."""
    can_fail: bool = True


def may_backtrack(pattern: str) -> bool:
    """Whether matching may take much longer than the square of the text's length."""
    try:
        part, end = _alternatives(pattern, 0, 0)
    except _NotUnderstoodError:
        return True
    return end != len(pattern) or part.open_alone > MOST_OPEN


def may_stall(step: object) -> bool:
    """Whether a step of a pipeline (`tokenizer.normalizer` and the like, or None) has such an expression."""
    if not isinstance(step, (tokenizers.normalizers.Normalizer, tokenizers.pre_tokenizers.PreTokenizer)) and not (
        isinstance(step, tokenizers.decoders.Decoder)
    ):
        return False
    return any(may_backtrack(pattern) for pattern in _patterns(json.loads(step.__getstate__())))


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _patterns(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key == "Regex" and isinstance(item, str):
                yield item
            else:
                yield from _patterns(item)


def _alternatives(pattern: str, at: int, depth: int) -> tuple[_Part, int]:
    """What stands up to a closing parenthesis or the end, and where that is."""
    if depth > MAX_DEPTH:
        raise _NotUnderstoodError
    branches = []
    while True:
        branch, at = _sequence(pattern, at, depth)
        branches.append(branch)
        if pattern[at : at + 1] != "|":
            break
        at += 1
    return (
        _Part(
            max(branch.open_inside for branch in branches),
            max(branch.open_alone for branch in branches),
            len(branches) > 1 or branches[0].ambiguous,
            all(branch.can_fail for branch in branches),
        ),
        at,
    )


def _sequence(pattern: str, at: int, depth: int) -> tuple[_Part, int]:
    parts: list[_Part] = []
    while at < len(pattern) and pattern[at] not in "|)":
        part, at = _atom(pattern, at, depth)
        while (found := _QUANTIFIER.match(pattern, at)) is not None:
            part = _repeated(part, found)
            at = found.end()
        parts.append(part)
    last = max((index for index, part in enumerate(parts) if part.can_fail), default=0)
    before = parts[:last]
    after = parts[last:]
    return (
        _Part(
            sum(part.open_inside for part in parts),
            sum(part.open_inside for part in before) + sum(part.open_alone for part in after),
            any(part.ambiguous for part in parts),
            any(part.can_fail for part in parts),
        ),
        at,
    )


def _atom(pattern: str, at: int, depth: int) -> tuple[_Part, int]:
    char = pattern[at]
    if char == "\\":
        found = _ESCAPE.match(pattern, at)
        if found is None:  # references and calls of groups among them
            raise _NotUnderstoodError
        return _Part(), found.end()
    if char == "[":
        return _Part(), _end_of_class(pattern, at, depth)
    if char == "(":
        return _group(pattern, at, depth)
    if char in "*+?":
        raise _NotUnderstoodError
    return _Part(), at + 1


def _group(pattern: str, at: int, depth: int) -> tuple[_Part, int]:
    nothing = _FLAGS.match(pattern, at) or _COMMENT.match(pattern, at)
    if nothing is not None:
        return _Part(can_fail=False), nothing.end()
    found = _OPENING.match(pattern, at)
    if found is None:
        raise _NotUnderstoodError
    part, end = _alternatives(pattern, found.end(), depth + 1)
    if pattern[end : end + 1] != ")":
        raise _NotUnderstoodError
    if found.group()[-1] in "=!":  # matches nothing, in one way, and may fail
        part = _Part(part.open_alone, part.open_alone)
    return part, end + 1


def _end_of_class(pattern: str, at: int, depth: int) -> int:
    if depth > MAX_DEPTH:
        raise _NotUnderstoodError
    at += 2 if pattern.startswith("[^", at) else 1
    first = at
    while at < len(pattern):
        char = pattern[at]
        if char == "]" and at > first:
            return at + 1
        if char == "\\":
            at += 2
        elif pattern.startswith("[:", at) and (end := pattern.find(":]", at)) > 0:
            at = end + 2
        elif char == "[":
            at = _end_of_class(pattern, at, depth + 1)
        else:
            at += 1
    raise _NotUnderstoodError


def _repeated(part: _Part, found: re.Match[str]) -> _Part:
    least, most = _counts(found)
    if most >= MANY and part.ambiguous:
        raise _NotUnderstoodError
    is_open = int(most >= LONG)
    return _Part(
        part.open_inside + is_open, part.open_alone, part.ambiguous or least != most, part.can_fail and least > 0
    )


def _counts(found: re.Match[str]) -> tuple[float, float]:
    text = found.group()
    if text[0] != "{":
        return {"*": (0, float("inf")), "+": (1, float("inf")), "?": (0, 1)}[text[0]]
    least, comma, most = found.groups()
    if not comma:
        return float(least or 0), float(least or 0)
    return float(least or 0), float(most) if most else float("inf")
