"""`JsonCallReader`: one tool call as a JSON object with a name and arguments, while its text arrives.
Does not know what stands around the object."""

from enum import Enum, auto

from pagemill.serve.parsers.format import JsonCall
from pagemill.serve.parsers.json_scan import Scan, ValueScan, is_object, parsed
from pagemill.serve.parsers.tools import NO_ARGUMENTS, Tools


class _Expected(Enum):
    OBJECT = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class JsonCallReader:
    """Implements `CallReader`. `{"name": "f", "arguments": {...}}`, members in any order, others ignored. Arguments may
    also be given as a text that holds the object, as null, or not at all."""

    def __init__(self, form: JsonCall, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self.name = ""
        self.status = Scan.OPEN
        """ENDED: the object was closed. FAILED: this is no call; or, once told, what follows is no part of one."""
        self.is_told = False
        """Whether the name and the beginning of the arguments have been passed on."""
        self.is_valid = False
        """Whether the arguments have ended and are a JSON object."""
        self._read: list[str] = []
        """Everything up to now, while the call is not told."""
        self._expected = _Expected.OBJECT
        self._scan: ValueScan | None = None
        self._value: list[str] = []
        """The key or value that is being read."""
        self._key = ""
        self._arguments: str | None = None
        """Those that came before the name."""

    @property
    def text(self) -> str:
        """What was read of a call that is not told."""
        return "".join(self._read)

    def feed(self, text: str, at: int, final: bool) -> tuple[str, int]:
        """See `CallReader`."""
        out: list[str] = []
        if self.is_told and self._scan is not None and self._is_streamed():
            end = self._scan.feed(text, at)
            if self._scan.status is Scan.OPEN:
                self._value.append(text[at:end])
                return text[at:end], end
            self._take(self._scan, text[at:end], out)
            at = end
        begin = at
        while at < len(text) and self.status is Scan.OPEN:
            at = self._read_value(text, at, out) if self._scan else self._read_mark(text, at, out)
        if not self.is_told:
            self._read.append(text[begin:at])
        return "".join(out), at

    def _read_mark(self, text: str, at: int, out: list[str]) -> int:
        """What stands between keys and values."""
        char = text[at]
        if char.isspace():
            return at + 1
        expected = self._expected
        if expected is _Expected.VALUE or (char == '"' and expected in (_Expected.KEY, _Expected.KEY_OR_END)):
            return self._begin_value(char, at, out)
        if expected is _Expected.OBJECT and char == "{":
            self._expected = _Expected.KEY_OR_END
        elif expected is _Expected.COLON and char == ":":
            self._expected = _Expected.VALUE
        elif expected is _Expected.COMMA_OR_END and char == ",":
            self._expected = _Expected.KEY
        elif expected in (_Expected.COMMA_OR_END, _Expected.KEY_OR_END) and char == "}":
            self._end(out)
        else:
            self.status = Scan.FAILED
            return at
        return at if self.status is Scan.FAILED else at + 1

    def _begin_value(self, char: str, at: int, out: list[str]) -> int:
        is_arguments = self._expected is _Expected.VALUE and self._key in self._form.arguments
        if is_arguments and (self.is_told or self._arguments is not None or char not in '{"n'):
            self.status = Scan.FAILED
            return at
        scan = ValueScan(char)
        if scan.status is Scan.FAILED:
            self.status = Scan.FAILED
            return at
        self._scan = scan
        self._value = [char]
        if is_arguments and char == "{" and self.name:
            self.is_told = True
            out.append(char)
        return at + 1

    def _read_value(self, text: str, at: int, out: list[str]) -> int:
        scan = self._scan
        if scan is None:
            return at
        end = scan.feed(text, at)
        self._take(scan, text[at:end], out)
        return end

    def _take(self, scan: ValueScan, piece: str, out: list[str]) -> None:
        """The next characters of a key or value."""
        self._value.append(piece)
        if self._is_streamed():
            out.append(piece)
        if scan.status is Scan.FAILED:
            self.status = Scan.FAILED
        elif scan.status is Scan.ENDED:
            self._keep_value("".join(self._value), out)
            self._scan = None

    def _is_streamed(self) -> bool:
        """Whether what is being read are arguments that are passed on."""
        return self.is_told and self._expected is _Expected.VALUE and self._key in self._form.arguments

    def _keep_value(self, text: str, out: list[str]) -> None:
        """A key or a value is complete."""
        if self._expected is not _Expected.VALUE:
            self._key = self._text_of(text)
            self._expected = _Expected.COLON
            return
        if self._is_streamed():
            self.is_valid = is_object(text)
        elif self._key in self._form.arguments:
            self._keep_arguments(text, out)
        elif self._key == self._form.name and not self.is_told:
            self.name = self._text_of(text)
            if not self._tools.allows(self.name):
                self.status = Scan.FAILED
            if self._arguments is not None and self.name:
                self._tell(self._arguments, out)
        self._expected = _Expected.COMMA_OR_END

    def _text_of(self, text: str) -> str:
        """The value of a JSON string that must not be empty; the call has failed where it is none."""
        value = _string_of(text)
        if not value:
            self.status = Scan.FAILED
        return value or ""

    def _keep_arguments(self, text: str, out: list[str]) -> None:
        """Arguments that were not passed on while they arrived."""
        inner = text if text.startswith("{") else NO_ARGUMENTS if text == "null" else _string_of(text)
        if inner is None or not is_object(inner):
            self.status = Scan.FAILED
        elif self.name:
            self._tell(inner, out)
        else:
            self._arguments = inner

    def _tell(self, arguments: str, out: list[str]) -> None:
        self.is_told = True
        self.is_valid = True
        out.append(arguments)

    def _end(self, out: list[str]) -> None:
        if not self.name or (self._form.needs_arguments and not self.is_told):
            self.status = Scan.FAILED
            return
        if not self.is_told:
            self._tell(NO_ARGUMENTS, out)
        self.status = Scan.ENDED


def _string_of(text: str) -> str | None:
    """The value of a JSON string; None when it is none."""
    try:
        value = parsed(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
