"""Looking for marks in a text that arrives in pieces, and reading heads. Time is linear in the text, however it is
cut: what is held back is bounded."""

import functools
import html
import re
from collections.abc import Iterable
from typing import Final

from pagemill.serve.parsers.format import MAX_HEAD_CHARS, Head

MAX_GAP_CHARS: Final = 64
"""White space that is looked over for what follows a mark."""
_SPACE: Final = re.compile(r"\s*")
_NEVER: Final = re.compile(r"(?!)")


class Marks:
    """Finds any of several marks."""

    __slots__ = ("_any", "_first", "_longest", "_prefixes", "may_have")

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text}, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, known))) if known else _NEVER
        self._first = re.compile("|".join(sorted({re.escape(text[0]) for text in known}))) if known else _NEVER
        self._longest = len(known[0]) if known else 1
        self.may_have = self._first.search
        """Called with a text: None where it has not even the first character of a mark."""
        self._prefixes = frozenset(text[:size] for text in known for size in range(1, len(text)))

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first mark."""
        if self._first.search(text, at) is None:
            return None
        return self._any.search(text, at)

    def at(self, text: str, at: int) -> str:
        """The mark that begins here; empty: none does."""
        match = self._any.match(text, at)
        return "" if match is None else match.group()

    def may_begin(self, text: str, at: int) -> bool:
        """Whether the rest of the text is the beginning of a mark. An empty rest is."""
        return at >= len(text) or text[at : at + self._longest] in self._prefixes

    def certain(self, text: str, at: int) -> int:
        """The place up to which no mark may begin that ends beyond the text; there is none in it."""
        match = self._first.search(text, max(at, len(text) - self._longest + 1))
        while match is not None:
            if text[match.start() :] in self._prefixes:
                return match.start()
            match = self._first.search(text, match.start() + 1)
        return len(text)


@functools.lru_cache(maxsize=256)
def marks_of(texts: tuple[str, ...]) -> Marks:
    """Made once for the same texts."""
    return Marks(texts)


def after_space(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def follows(marks: Marks, text: str, at: int, final: bool) -> bool | None:
    """Whether one of the marks follows, after white space; None while that cannot be said. The end of the message
    counts as one."""
    place = after_space(text, at)
    if marks.at(text, place) or place - at > MAX_GAP_CHARS:
        return True
    if not marks.may_begin(text, place):
        return False
    return True if final else None


class HeadFound:
    """A head that was read."""

    __slots__ = ("_groups", "end", "name")

    def __init__(self, name: str, groups: dict[str, str | None], end: int) -> None:
        self.name = name
        self._groups = groups
        self.end = end
        """The place after it."""

    def group(self, name: str) -> str | None:
        """What else the pattern found."""
        return self._groups.get(name)


class HeadReader:
    """Reads heads of one kind."""

    __slots__ = ("_chars", "_ends", "_head", "_holds", "_pattern")

    def __init__(self, head: Head) -> None:
        self._head = head
        one = "|".join([*map(re.escape, head.holds), head.chars])
        self._chars = re.compile(f"(?:{one}){{0,{MAX_HEAD_CHARS + 1}}}")
        self._ends = marks_of(head.end)
        self._holds = marks_of(head.holds)
        self._pattern = re.compile(head.pattern, re.DOTALL)

    def read(self, text: str, at: int) -> HeadFound | bool | None:
        """The head that begins here; False: there is none; None while that cannot be said."""
        head = self._head
        if not text.startswith(head.start, at):
            return None if head.start.startswith(text[at : at + len(head.start)]) else False
        begin = at + len(head.start)
        match = self._chars.match(text, begin)
        stop = begin if match is None else match.end()
        if stop - begin > MAX_HEAD_CHARS:
            return False
        end = self._ends.at(text, stop)
        if end:
            return self._found(text[begin:stop], stop if head.keeps_end else stop + len(end))
        return None if self._ends.may_begin(text, stop) or self._holds.may_begin(text, stop) else False

    def _found(self, inner: str, end: int) -> HeadFound | bool:
        match = self._pattern.fullmatch(inner)
        if match is None:
            return False
        name = match["name"]
        return HeadFound(html.unescape(name) if self._head.escaped else name, match.groupdict(), end)


@functools.lru_cache(maxsize=256)
def head_reader(head: Head) -> HeadReader:
    """Made once for the same head."""
    return HeadReader(head)
