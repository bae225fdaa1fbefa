"""`EbnfWriter`: collects the rules of a grammar in the EBNF of GBNF, for backends that read nothing richer. Knows
nothing about JSON schemas."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pagemill.grammar.json_values import Budget
from pagemill.grammar.regexes import ANY, Chars, Either, Node, Ranges, Repeat, all_but, ranges_of
from pagemill.grammar.regexes import Sequence as Parts

MAX_RULES: Final = 20_000
MAX_CHARS: Final = 1 << 20
"""Of the grammar that is written."""
EMPTY: Final = '""'
_SHORT: Final = {0x8: "b", 0x9: "t", 0xA: "n", 0xC: "f", 0xD: "r", 0x22: '"', 0x5C: "\\"}
ESCAPED: Final = ranges_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
"""Characters that cannot stand in a JSON string as they are. Each has one spelling here, so that a text has one."""
PLAIN_BUT: Final = r"\u0000-\u001f\u0022\u005c"
"""The same, as a class has them."""


class EbnfWriter:
    """Collects the rules of one grammar; each has a name of its own."""

    def __init__(self, budget: Budget | None = None) -> None:
        """`budget`: for the rules (default: MAX_RULES)."""
        self._bodies: list[str | None] = []
        self._names: dict[str, str] = {}
        self._budget = budget or Budget(MAX_RULES)
        self._num_chars = 0

    def reserve(self) -> str:
        """The name of a rule that `define` is called for later."""
        self._budget.spend()
        self._bodies.append(None)
        return f"r{len(self._bodies) - 1}"

    def define(self, name: str, body: str) -> None:
        """What a reserved rule is."""
        self._num_chars += len(body)
        if self._num_chars > MAX_CHARS:
            raise ValueError("it becomes too large a grammar")
        self._bodies[int(name[1:])] = body

    def rule(self, body: str) -> str:
        """Add a rule; its name. One of the same body is not added again."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = self.reserve()
            self.define(name, body)
        return name

    def source(self, start: str) -> str:
        """The whole grammar as EBNF text; its root is `start`, the body of a rule."""
        return "\n".join([f"root ::= {start}", *(f"r{at} ::= {body}" for at, body in enumerate(self._bodies))])

    def expression(self, node: Node, of_chars: Callable[[Ranges], str] | None = None) -> str:
        """The body of what an expression without anchors matches; `of_chars` writes one character of it, as it is
        unless said otherwise."""
        write = of_chars or chars
        match node:
            case Chars(ranges):
                if not ranges:
                    raise ValueError("a class of characters is empty")
                return write(ranges)
            case Parts(parts):
                return " ".join(self.expression(part, write) for part in parts) or EMPTY
            case Either(parts):
                return self.rule(" | ".join(self.expression(part, write) for part in parts))
            case Repeat(part, least, most):
                return repeated(self._repeatable(part, write), least, most)
        raise ValueError("^ and $ are not supported here")

    def until(self, ends: Sequence[str], others: Sequence[str] = (), excludes: Sequence[str] = ()) -> str:
        """Any text that ends with one of `ends`, and has neither them nor any of the others before."""
        return self._searching([*ends, *others, *excludes], ends)

    def without(self, others: Sequence[str], excludes: Sequence[str] = ()) -> str:
        """Any text that has none of these."""
        return self._searching([*others, *excludes], ())

    def _searching(self, texts: Sequence[str], ends: Sequence[str]) -> str:
        """Goes through a text with a rule for each beginning of one of `texts` that may be the last of what has come;
        of them, only `ends` may be there as a whole, and the text ends with that. None: it ends anywhere else."""
        begun = dict.fromkeys(text[:size] for text in texts for size in range(len(text)))
        names = {seen: self.reserve() for seen in begun}
        letters = sorted({char for text in texts for char in text})
        for seen, name in names.items():
            self._budget.spend(len(letters))
            followers: dict[str, list[int]] = {}
            named = []
            for char in letters:
                now = seen + char
                whole = [text for text in texts if now.endswith(text)]
                after = next(now[at:] for at in range(len(now) + 1) if now[at:] in begun)
                if not whole and not after:
                    continue
                named.append(ord(char))
                if any(text in ends for text in whole):
                    followers.setdefault("", []).append(ord(char))
                elif not whole:
                    followers.setdefault(names[after], []).append(ord(char))
            bodies = [f"{chars(all_but(_each(named)))} {names['']}"]
            bodies += [f"{chars(_each(codes))} {after}".rstrip() for after, codes in followers.items()]
            self.define(name, " | ".join(bodies if ends else [EMPTY, *bodies]))
        return names[""]

    def _repeatable(self, part: Node, write: Callable[[Ranges], str]) -> str:
        body = self.expression(part, write)
        return body if isinstance(part, Chars) and body.startswith("[") else self.rule(body)


def repeated(item: str, least: int, most: int | None) -> str:
    """A rule or a class of characters, several times."""
    match (least, most):
        case (_, 0):
            return EMPTY
        case (1, 1):
            return item
        case (0, None):
            return f"{item}*"
        case (1, None):
            return f"{item}+"
        case (0, 1):
            return f"{item}?"
    return f"{item}{{{least}}}" if least == most else f"{item}{{{least},{'' if most is None else most}}}"


def text(value: str) -> str:
    """A text as it is."""
    if not value:
        return EMPTY
    found = []
    for char in value:
        code = ord(char)
        found.append(char if 0x20 <= code < 0x7F and char not in '"\\' else _escape(code))
    return f'"{"".join(found)}"'


@functools.lru_cache(4096)
def chars(ranges: Ranges) -> str:
    """One character of these ranges."""
    return f"[{''.join(_range(first, last) for first, last in ranges)}]"


def any_text() -> str:
    """The body of a rule for any text, also none."""
    return f"{chars(ANY.ranges)}*"


@functools.lru_cache(4096)
def json_chars(ranges: Ranges) -> str:
    """One character of a JSON string, as JSON writes it."""
    escaped = [code for first, last in ESCAPED for code in range(first, last + 1) if is_in(code, ranges)]
    plain = ranges_of(minus(ranges, ESCAPED))
    bodies = [chars(plain)] if plain else []
    bodies += [text(json_char(code)) for code in escaped]
    return bodies[0] if len(bodies) == 1 else f"({' | '.join(bodies)})"


def json_char(code: int) -> str:
    """A character of a JSON string in the one spelling that is allowed."""
    if code in _SHORT:
        return f"\\{_SHORT[code]}"
    return f"\\u{code:04x}" if code < 0x20 else chr(code)


def json_text(value: str) -> str:
    """What stands between the quotes of a JSON string. Raises ValueError for half a surrogate pair."""
    value.encode()
    return "".join(json_char(ord(char)) for char in value)


def json_scalar(value: object) -> str:
    """A JSON value without parts, as it is."""
    return text(f'"{json_text(value)}"' if isinstance(value, str) else json.dumps(value))


def _escape(code: int) -> str:
    # Never by \x, which takes all digits that follow.
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"


def _range(first: int, last: int) -> str:
    return class_char(first) if first == last else f"{class_char(first)}-{class_char(last)}"


@functools.lru_cache(4096)
def class_char(code: int) -> str:
    """A character as a class has it."""
    return chr(code) if code < 0x7F and chr(code).isalnum() else _escape(code)


def is_in(code: int, ranges: Ranges) -> bool:
    """Whether a character is one of these."""
    return any(first <= code <= last for first, last in ranges)


def minus(ranges: Ranges, others: Ranges) -> Iterable[tuple[int, int]]:
    """Characters of the first that are none of the second, which has ranges in order."""
    for first, last in ranges:
        for low, high in all_but(others):
            if max(first, low) <= min(last, high):
                yield max(first, low), min(last, high)


def _each(codes: Iterable[int]) -> Ranges:
    return ranges_of((code, code) for code in codes)
