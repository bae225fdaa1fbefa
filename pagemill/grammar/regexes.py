"""Regular expressions as trees: what a pattern means, in the terms of character ranges. The dialect is that of JSON
Schema (ECMA 262 with `u`), of which backends that have no expressions of their own follow all that is regular."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pagemill.grammar.json_values import Budget

MAX_NODES: Final = 20_000
MAX_DEPTH: Final = 64
MAX_REPEATS: Final = 10_000
MAX_BRANCHES: Final = 64
LAST: Final = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""First and last code point of each, ascending, with gaps between them."""


@dataclass(frozen=True)
class Chars:
    """A regular expression that matches one character of some ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    """One part after another."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Either:
    """One of the parts."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Repeat:
    """A part several times."""

    part: "Node"
    least: int
    most: int | None
    """None: any number of times."""


@dataclass(frozen=True)
class Anchor:
    """`^`, or `$`."""

    at_start: bool


Node = Chars | Sequence | Either | Repeat | Anchor
EMPTY: Final = Sequence(())


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges that may overlap, in order. No half of a surrogate pair is a character."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(part for pair in found for part in _without_surrogates(pair))


def _without_surrogates(pair: tuple[int, int]) -> list[tuple[int, int]]:
    parts = [(pair[0], min(pair[1], 0xD7FF)), (max(pair[0], 0xE000), pair[1])]
    return [part for part in parts if part[0] <= part[1]]


def all_but(ranges: Ranges) -> Ranges:
    """Every other character."""
    found, at = [], 0
    for first, last in ranges:
        found.append((at, first - 1))
        at = last + 1
    found.append((at, LAST))
    return ranges_of(pair for pair in found if pair[0] <= pair[1])


DIGITS: Final = ((0x30, 0x39),)
WORD: Final = ranges_of([*DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACES: Final = ranges_of(
    (first, first + more)
    for first, more in (
        (0x9, 4),
        (0x20, 0),
        (0xA0, 0),
        (0x1680, 0),
        (0x2000, 10),
        (0x2028, 1),
        (0x202F, 0),
        (0x205F, 0),
        (0x3000, 0),
        (0xFEFF, 0),
    )
)
NO_NEWLINE: Final = all_but(ranges_of([(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]))
ANY: Final = Chars(all_but(()))
_CLASSES: Final = {
    "d": DIGITS, "D": all_but(DIGITS), "w": WORD, "W": all_but(WORD), "s": SPACES, "S": all_but(SPACES),
}  # fmt: skip
_NAMED: Final = {"n": 0xA, "r": 0xD, "t": 0x9, "f": 0xC, "v": 0xB, "0": 0}
_TIMES: Final = re.compile(r"\{(\d{1,6})(,(\d{1,6})?)?\}")
_HEX: Final = {"x": re.compile(r"[0-9A-Fa-f]{2}"), "u": re.compile(r"[0-9A-Fa-f]{4}|\{[0-9A-Fa-f]{1,6}\}")}
_GROUP: Final = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")


def whole(pattern: str) -> Node:
    """What a pattern matches as a whole; anchors around it say nothing new. Raises ValueError for what is not regular,
    or malformed."""
    return _either([core for _, core, _ in _anchored(_Parser(pattern).tree())])


def searched(pattern: str) -> Node:
    """Texts in which a pattern is found. Raises ValueError for what is not regular, or malformed."""
    rest = Repeat(ANY, 0, None)
    return _either(
        [
            _sequence([*([] if starts else [rest]), core, *([] if ends else [rest])])
            for starts, core, ends in _anchored(_Parser(pattern).tree())
        ]
    )


def lengths(node: Node) -> tuple[int, int | None]:
    """How many characters a text has at least and at most; None: any number."""
    match node:
        case Chars():
            return 1, 1
        case Anchor():
            return 0, 0
        case Repeat(part, least, most):
            low, high = lengths(part)
            unbounded = high is None or (most is None and high > 0)
            return low * least, None if unbounded and most != 0 else (high or 0) * (most or 0)
    found = [lengths(part) for part in node.parts]
    highs = [high for _, high in found if high is not None]
    bounded = len(highs) == len(found)
    if isinstance(node, Sequence):
        return sum(low for low, _ in found), sum(highs) if bounded else None
    return min(low for low, _ in found), max(highs) if bounded else None


def _sequence(parts: list[Node]) -> Node:
    flat = [item for part in parts for item in (part.parts if isinstance(part, Sequence) else [part])]
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def _either(parts: list[Node]) -> Node:
    if len(parts) == 1:
        return parts[0]
    return Either(tuple(parts))


def _anchored(node: Node) -> list[tuple[bool, Node, bool]]:
    """Branches of a tree: whether it is anchored at the start, what is between, and whether at the end."""
    if not _has_anchor(node):
        return [(False, node, False)]
    match node:
        case Anchor(at_start):
            return [(at_start, EMPTY, not at_start)]
        case Either(parts):
            return [branch for part in parts for branch in _anchored(part)]
        case Sequence(parts):
            found: list[tuple[bool, Node, bool]] = [(False, EMPTY, False)]
            for part in parts:
                found = [_joined(left, right) for left in found for right in _anchored(part)]
                if len(found) > MAX_BRANCHES:
                    raise ValueError("the expression has too many branches with ^ or $")
            return found
    raise ValueError("^ and $ are not supported inside of what is repeated")


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Chars():
            return False
        case Repeat(part):
            return _has_anchor(part)
    return any(map(_has_anchor, node.parts))


def _joined(left: tuple[bool, Node, bool], right: tuple[bool, Node, bool]) -> tuple[bool, Node, bool]:
    if (right[0] and left[1] != EMPTY) or (left[2] and right[1] != EMPTY):
        raise ValueError("^ and $ are not supported in the middle of an expression")
    return left[0] or right[0], _sequence([left[1], right[1]]), left[2] or right[2]


class _Parser:
    """Reads one pattern."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._budget = Budget(MAX_NODES)

    def tree(self) -> Node:
        found = self._alternatives(0)
        if self._at < len(self._text):
            raise self._malformed("an unmatched )")
        return found

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ValueError(f"the expression is nested more than {MAX_DEPTH} levels deep")
        parts = [self._items(depth)]
        while self._take("|"):
            parts.append(self._items(depth))
        return _either(parts)

    def _items(self, depth: int) -> Node:
        found: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            self._budget.spend()
            found.append(self._repeated(self._atom(depth)))
        return _sequence(found)

    def _repeated(self, atom: Node) -> Node:
        while (times := self._times()) is not None:
            if isinstance(atom, Anchor):
                raise self._malformed("nothing to repeat")
            atom = Repeat(atom, *times)
            self._take("?")  # lazy: the same texts
            if self._text[self._at : self._at + 1] == "+":
                raise self._malformed("a possessive repetition, which is not supported")
        return atom

    def _times(self) -> tuple[int, int | None] | None:
        for mark, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return times
        found = _TIMES.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        least = int(found[1])
        most = least if not found[2] else int(found[3]) if found[3] else None
        if least > MAX_REPEATS or (most is not None and not least <= most <= MAX_REPEATS):
            raise self._malformed(f"{found[0]}: repetitions are 0 to {MAX_REPEATS}, in this order")
        return least, most

    def _atom(self, depth: int) -> Node:
        char = self._text[self._at]
        self._at += 1
        match char:
            case "(":
                return self._group(depth)
            case "[":
                return Chars(self._set())
            case ".":
                return Chars(NO_NEWLINE)
            case "^" | "$":
                return Anchor(char == "^")
            case "\\":
                return Chars(self._escaped())
            case "*" | "+" | "?":
                raise self._malformed("nothing to repeat")
        return Chars(ranges_of([(ord(char), ord(char))]))

    def _group(self, depth: int) -> Node:
        if self._text[self._at : self._at + 1] == "?":
            kind = _GROUP.match(self._text, self._at)
            if kind is None:
                raise self._malformed(f"({self._text[self._at : self._at + 3]}: this group is not supported")
            self._at = kind.end()
        found = self._alternatives(depth + 1)
        if not self._take(")"):
            raise self._malformed("an unmatched (")
        return found

    def _set(self) -> Ranges:
        negative = self._take("^")
        pairs: list[tuple[int, int]] = []
        while not self._take("]"):
            self._budget.spend()
            first = self._member()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member()
                if not (_is_one(first) and _is_one(last) and first[0][0] <= last[0][0]):
                    raise self._malformed("a malformed range of characters")
                first = ((first[0][0], last[0][0]),)
            pairs += first
        found = ranges_of(pairs)
        return all_but(found) if negative else found

    def _member(self) -> Ranges:
        if self._at >= len(self._text):
            raise self._malformed("an unmatched [")
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return ((ord(char), ord(char)),)
        if self._take("b"):
            return ((8, 8),)
        return self._escaped()

    def _escaped(self) -> Ranges:
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _HEX:
            digits = _HEX[char].match(self._text, self._at)
            if digits is None:
                raise self._malformed(f"a malformed \\{char}")
            self._at = digits.end()
            code = int(digits[0].strip("{}"), 16)
        elif char in _NAMED and not (char == "0" and self._text[self._at : self._at + 1].isdecimal()):
            code = _NAMED[char]
        elif not char or char.isalnum():
            raise self._malformed(f"\\{char}, which is not supported")
        else:
            code = ord(char)
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            raise self._malformed("what is no character")
        return ((code, code),)

    def _take(self, char: str) -> bool:
        if self._text[self._at : self._at + 1] != char:
            return False
        self._at += 1
        return True

    def _malformed(self, what: str) -> ValueError:
        return ValueError(f"the expression {self._text[:80]!r} has {what} at character {self._at}")


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
