"""`ElementCallReader`: one tool call with an element for each argument, whose values stand between marks.

A value may hold any mark as text. So a mark ends it only where that is followed by what may come next: another argument
or the end of the call.
"""

from pagemill.serve.parsers.format import ElementCall
from pagemill.serve.parsers.json_scan import Scan
from pagemill.serve.parsers.marks import HeadFound, after_space, follows, head_reader, marks_of
from pagemill.serve.parsers.tools import NO_ARGUMENTS, Tools
from pagemill.serve.parsers.values import ValueWriter, escaped

_STRING = frozenset({"string"})
_NO_STRING = frozenset({"integer", "number", "boolean", "object", "array", "null"})
_UNKNOWN: frozenset[str] = frozenset()


class ElementCallReader:
    """Implements `CallReader`."""

    def __init__(self, form: ElementCall, tools: Tools, begin: tuple[str, ...] = (), end: tuple[str, ...] = ()) -> None:
        """`begin`, `end`: the marks around calls."""
        self._form = form
        self._tools = tools
        self._ends = end
        self._head = head_reader(form.head)
        self._argument = head_reader(form.argument)
        self._after_value = marks_of((form.argument.start, form.end, *end))
        self._after_call = marks_of((*end, *begin))
        self._value_marks = marks_of(_value_marks(form))
        self._in_call = marks_of((form.argument.start, form.end, *end))
        self.name = ""
        self.status = Scan.OPEN
        self.is_told = False
        self.is_valid = False
        self._read: list[str] = []
        """Everything up to now, while the call is not told."""
        self._key: str | None = None
        """Of the argument whose value begins."""
        self._types = _UNKNOWN
        self._value: ValueWriter | None = None
        self._num_arguments = 0

    @property
    def text(self) -> str:
        """See `CallReader`."""
        return "".join(self._read)

    def feed(self, text: str, at: int, final: bool) -> tuple[str, int]:
        """See `CallReader`."""
        if self._value is not None and self._value_marks.may_have(text, at) is None:
            return self._value.feed(text[at:]), len(text)
        out: list[str] = []
        begin = at
        while self.status is Scan.OPEN:
            place = self._step(text, at, final, out)
            if place is None:
                break
            at = place
        if not self.is_told:
            self._read.append(text[begin:at])
        return "".join(out), at

    def _step(self, text: str, at: int, final: bool, out: list[str]) -> int | None:
        """Read one part; the place after it, None when more text is needed."""
        if not self.name:
            return self._read_name(text, at, out)
        if self._value is not None:
            return self._read_value(self._value, text, at, final, out)
        if self._key is not None:
            return self._begin_value(self._key, text, at, out)
        return self._read_between(text, at, out)

    def _read_name(self, text: str, at: int, out: list[str]) -> int | None:
        found = self._head.read(text, at)
        if found is None:
            return None
        if isinstance(found, bool) or not self._tools.allows(found.name):
            self.status = Scan.FAILED
            return at
        self.name = found.name
        if found.group("empty"):
            self._end(out)
        return found.end

    def _read_between(self, text: str, at: int, out: list[str]) -> int | None:
        """Before an argument, or the end."""
        place = after_space(text, at)
        mark = self._in_call.at(text, place)
        if not mark:
            if not self._in_call.may_begin(text, place):
                self.status = Scan.FAILED
                return at
            return place if place > at else None
        if mark != self._form.argument.start:
            self._end(out)
            return place + len(mark) if mark == self._form.end else place
        found = self._argument.read(text, place)
        if found is None:
            return place if place > at else None
        if isinstance(found, bool):
            self.status = Scan.FAILED
            return at
        self._key = found.name
        self._types = self._types_of(found)
        return found.end

    def _types_of(self, found: HeadFound) -> frozenset[str]:
        """From the argument's head, or the tool's schema."""
        kind = found.group("type") or {"true": "string", "false": "json"}.get(found.group("string") or "")
        if kind is None:
            return self._tools.types(self.name, found.name)
        return _STRING if kind == "string" else _NO_STRING

    def _begin_value(self, key: str, text: str, at: int, out: list[str]) -> int | None:
        form = self._form
        if form.value_begin:
            place = after_space(text, at)
            if not text.startswith(form.value_begin, place):
                if form.value_begin.startswith(text[place : place + len(form.value_begin)]):
                    return place if place > at else None
                self.status = Scan.FAILED
                return at
            at = place + len(form.value_begin)
        elif at == len(text):
            return None
        if form.wraps and text.startswith("\n", at):
            at += 1
        out.append("{" if self._num_arguments == 0 else ", ")
        out.append(f'"{escaped(key)}": ')
        self.is_told = True
        self._num_arguments += 1
        self._key = None
        self._value = ValueWriter(self._types)
        return at

    def _read_value(self, value: ValueWriter, text: str, at: int, final: bool, out: list[str]) -> int | None:
        match = self._value_marks.find(text, at)
        if match is None:
            place = self._value_marks.certain(text, at)
            out.append(value.feed(text[at:place]))
            return place if place > at else None
        begin = match.start()
        out.append(value.feed(text[at:begin]))
        ends = self._ends_value(match.group(), text, begin, match.end(), final)
        if ends is None:
            return begin if begin > at else None
        if not ends:
            out.append(value.feed(text[begin : begin + 1]))
            return begin + 1
        out.append(value.end())
        self._value = None
        return match.end() if match.group().endswith(self._form.value_end) else begin

    def _ends_value(self, mark: str, text: str, begin: int, end: int, final: bool) -> bool | None:
        """Whether a mark in a value ends it; None while that cannot be said."""
        if mark.endswith(self._form.value_end):
            return follows(self._after_value, text, end, final)
        if self._form.argument.start and mark.endswith(self._form.argument.start):
            found = self._argument.read(text, begin + len(mark) - len(self._form.argument.start))
            return found if found is None else not isinstance(found, bool)
        return follows(self._after_call, text, end, final)

    def _end(self, out: list[str]) -> None:
        out.append("}" if self._num_arguments else "" if self.is_told else NO_ARGUMENTS)
        self.is_told = True
        self.is_valid = True
        self.status = Scan.ENDED


def _value_marks(form: ElementCall) -> tuple[str, ...]:
    """What may end a value. Where values are wrapped, a line feed before it is no part of the value, and only there may
    the value's end be left out before another argument."""
    if not form.wraps:
        return (form.value_end, form.end)
    return (form.value_end, "\n" + form.value_end, "\n" + form.argument.start, "\n" + form.end)
