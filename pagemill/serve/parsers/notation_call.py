"""`NotationCallReader`: one tool call whose arguments are literals of a language, such as Python.
They become JSON while they arrive; nothing is evaluated."""

import re
from enum import Enum, auto
from typing import Final

from pagemill.serve.parsers.format import MAX_HEAD_CHARS, NotationCall
from pagemill.serve.parsers.json_scan import Scan, parsed
from pagemill.serve.parsers.marks import after_space, head_reader, marks_of
from pagemill.serve.parsers.tools import Tools
from pagemill.serve.parsers.values import escaped

MAX_DEPTH: Final = 100
"""Of lists and objects within each other."""
_WORDS: Final = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_WORD: Final = re.compile(r"[^,\[\]{}()\s:=\"'\\]*")
_BARE_WORD: Final = re.compile(r"[^,\[\]{}<>\n]*")
_NAME: Final = re.compile(r"[^\W\d]\w*")
_BARE_NAME: Final = re.compile(r"[^:{}\[\],<>\n]*")
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": "",
    "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
_HEX_ESCAPES: Final = {"x": 2, "u": 4, "U": 8}
_CLOSERS: Final = {"[": "]", "{": "}", "(": ")"}


class _Expected(Enum):
    KEY_OR_END = auto()
    KEY = auto()
    ASSIGNMENT = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    STRING = auto()
    COMMA_OR_END = auto()


class NotationCallReader:
    """Implements `CallReader`."""

    def __init__(self, form: NotationCall, tools: Tools) -> None:
        self._form = form
        self._head = head_reader(form.head)
        self._tools = tools
        self._quotes = marks_of(form.quotes)
        self.name = ""
        self.status = Scan.OPEN
        self.is_told = False
        self.is_valid = False
        self._read: list[str] = []
        """Everything up to now, while the call is not told."""
        self._closers = [form.end]
        """Of what is open, the innermost last."""
        self._expected = _Expected.KEY_OR_END
        escape = ("\\",) if form.escapes else ()
        self._stops = {quote: marks_of((quote, *escape)) for quote in form.quotes}
        self._quote = ""
        """Of the string that is being read."""
        self._string_is_key = False

    @property
    def text(self) -> str:
        """See `CallReader`."""
        return "".join(self._read)

    def feed(self, text: str, at: int, final: bool) -> tuple[str, int]:
        """See `CallReader`."""
        if self._expected is _Expected.STRING and self._stops[self._quote].may_have(text, at) is None:
            return escaped(text[at:]), len(text)
        out: list[str] = []
        begin = at
        while self.status is Scan.OPEN:
            place = self._step(text, at, out)
            if place is None:
                break
            at = place
        if not self.is_told:
            self._read.append(text[begin:at])
        return "".join(out), at

    def _step(self, text: str, at: int, out: list[str]) -> int | None:
        """Read one part; the place after it, None when more text is needed."""
        if not self.name:
            return self._read_name(text, at)
        if self._expected is _Expected.STRING:
            return self._read_string(text, at, out)
        place = after_space(text, at)
        if place == len(text):
            return place if place > at else None
        char = text[place]
        expected = self._expected
        if char == self._closers[-1] and expected not in (_Expected.ASSIGNMENT, _Expected.VALUE):
            return self._close(char, place, out)
        if expected is _Expected.COMMA_OR_END:
            return self._after_comma(place, out) if char == "," else self._fail(at)
        if expected is _Expected.ASSIGNMENT:
            return self._assign(char, place, out)
        if expected in (_Expected.KEY, _Expected.KEY_OR_END):
            return self._read_key(text, place, out)
        return self._read_value(text, place, out)

    def _fail(self, at: int) -> int:
        self.status = Scan.FAILED
        return at

    def _read_name(self, text: str, at: int) -> int | None:
        found = self._head.read(text, at)
        if found is None:
            return None
        if isinstance(found, bool) or not self._tools.allows(found.name):
            return self._fail(at)
        self.name = found.name
        return found.end

    def _tell(self, out: list[str]) -> None:
        if not self.is_told:
            self.is_told = True
            out.append("{")

    def _close(self, char: str, at: int, out: list[str]) -> int:
        self._tell(out)
        self._closers.pop()
        out.append("]" if self._closers and char in ")]" else "}")
        self._expected = _Expected.COMMA_OR_END
        if not self._closers:
            self.is_valid = True
            self.status = Scan.ENDED
        return at + 1

    def _is_object(self) -> bool:
        """Whether what is open has keys."""
        return len(self._closers) == 1 or self._closers[-1] == "}"

    def _after_comma(self, at: int, out: list[str]) -> int:
        self._expected = _Expected.KEY if self._is_object() else _Expected.VALUE
        out.append(", ")
        return at + 1

    def _assign(self, char: str, at: int, out: list[str]) -> int:
        if char != (self._form.assigns if len(self._closers) == 1 else ":"):
            return self._fail(at)
        out.append(": ")
        self._expected = _Expected.VALUE
        return at + 1

    def _read_key(self, text: str, at: int, out: list[str]) -> int | None:
        quote = self._quotes.at(text, at)
        bare = self._form.bare_strings
        if quote and (bare or len(self._closers) > 1):
            return self._begin_string(quote, at, out, is_key=True)
        if len(self._closers) > 1 and not bare:
            return self._fail(at)
        match = (_BARE_NAME if bare else _NAME).match(text, at)
        end = at if match is None else match.end()
        if end == len(text) or (quote == "" and self._quotes.may_begin(text, at)):
            return None if end - at <= MAX_HEAD_CHARS else self._fail(at)
        key = text[at:end].strip()
        if not key:
            return self._fail(at)
        self._tell(out)
        out.append(f'"{escaped(key)}"')
        self._expected = _Expected.ASSIGNMENT
        return end

    def _read_value(self, text: str, at: int, out: list[str]) -> int | None:
        char = text[at]
        quote = self._quotes.at(text, at)
        if quote:
            return self._begin_string(quote, at, out, is_key=False)
        if char in _CLOSERS and (char != "(" or self._form.escapes):
            if len(self._closers) > MAX_DEPTH:
                return self._fail(at)
            self._closers.append(_CLOSERS[char])
            self._expected = _Expected.KEY_OR_END if char == "{" else _Expected.VALUE_OR_END
            out.append("{" if char == "{" else "[")
            return at + 1
        return self._read_word(text, at, out)

    def _read_word(self, text: str, at: int, out: list[str]) -> int | None:
        bare = self._form.bare_strings
        match = (_BARE_WORD if bare else _WORD).match(text, at)
        end = at if match is None else match.end()
        if end == len(text) or (end == at and self._quotes.may_begin(text, at)):
            return None if end - at <= MAX_HEAD_CHARS else self._fail(at)
        word = text[at:end].strip()
        written = _WORDS.get(word) or _number(word)
        if written is None and bare and word:
            written = f'"{escaped(word)}"'
        if written is None:
            return self._fail(at)
        out.append(written)
        self._expected = _Expected.COMMA_OR_END
        return end

    def _begin_string(self, quote: str, at: int, out: list[str], is_key: bool) -> int:
        self._tell(out)
        self._quote = quote
        self._string_is_key = is_key
        self._expected = _Expected.STRING
        out.append('"')
        return at + len(quote)

    def _read_string(self, text: str, at: int, out: list[str]) -> int | None:
        """The text up to the end of the string, or to an escape."""
        stops = self._stops[self._quote]
        match = stops.find(text, at)
        end = stops.certain(text, at) if match is None else match.start()
        if end > at:
            out.append(escaped(text[at:end]))
            return end
        if match is None:
            return None
        if match.group() == "\\":
            return self._read_escape(text, at + 1, out)
        out.append('"')
        self._expected = _Expected.ASSIGNMENT if self._string_is_key else _Expected.COMMA_OR_END
        return match.end()

    def _read_escape(self, text: str, at: int, out: list[str]) -> int | None:
        if at == len(text):
            return None
        char = text[at]
        size = _HEX_ESCAPES.get(char)
        if size is None:
            out.append(escaped(_ESCAPES[char] if char in _ESCAPES else "\\" + char))
            return at + 1
        digits = text[at + 1 : at + 1 + size]
        if len(digits) < size and re.fullmatch(r"[0-9a-fA-F]*", digits):
            return None
        if re.fullmatch(r"[0-9a-fA-F]+", digits) and int(digits, 16) <= 0x10FFFF:
            code = int(digits, 16)
            out.append(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escaped(chr(code)))
            return at + 1 + size
        out.append(escaped("\\" + char))
        return at + 1


def _number(word: str) -> str | None:
    """A number as JSON, as it is written where JSON allows that; None when it is none."""
    if not word or word[0] not in "+-.0123456789":
        return None
    try:
        parsed(word)
    except ValueError:
        pass
    else:
        return word
    try:
        value = float(word) if re.search(r"[.eE]", word) else int(word)
    except ValueError:
        return None
    return repr(value) if abs(value) != float("inf") else None
