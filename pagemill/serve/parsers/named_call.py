"""`NamedCallReader`: one tool call as a name between marks, and arguments as a JSON object after it."""

from pagemill.serve.parsers.format import NamedCall
from pagemill.serve.parsers.json_scan import Scan, ValueScan, is_object
from pagemill.serve.parsers.marks import after_space, head_reader
from pagemill.serve.parsers.tools import Tools


class NamedCallReader:
    """Implements `CallReader`."""

    def __init__(self, form: NamedCall, tools: Tools) -> None:
        self._head = head_reader(form.head)
        self._tools = tools
        self.name = ""
        self.status = Scan.OPEN
        self.is_told = False
        self.is_valid = False
        self._read: list[str] = []
        """Everything up to now, while the call is not told."""
        self._scan: ValueScan | None = None
        self._arguments: list[str] = []

    @property
    def text(self) -> str:
        """See `CallReader`."""
        return "".join(self._read)

    def feed(self, text: str, at: int, final: bool) -> tuple[str, int]:
        """See `CallReader`."""
        if not self.name:
            begin = at
            at = self._read_head(text, at)
            self._read.append(text[begin:at])
        if not self.name or self.status is not Scan.OPEN:
            return "", at
        if self._scan is None:
            place = after_space(text, at)
            self._read.append(text[at:place])
            if place == len(text):
                return "", place
            if text[place] != "{":
                self.status = Scan.FAILED
                return "", place
            self._scan = ValueScan("{")
            self.is_told = True
            self._arguments.append("{")
            rest, at = self._read_arguments(self._scan, text, place + 1)
            return "{" + rest, at
        return self._read_arguments(self._scan, text, at)

    def _read_head(self, text: str, at: int) -> int:
        found = self._head.read(text, at)
        if found is None:
            return at
        if isinstance(found, bool) or not self._tools.allows(found.name):
            self.status = Scan.FAILED
            return at
        self.name = found.name
        return found.end

    def _read_arguments(self, scan: ValueScan, text: str, at: int) -> tuple[str, int]:
        end = scan.feed(text, at)
        piece = text[at:end]
        self._arguments.append(piece)
        self.status = scan.status
        if scan.status is Scan.ENDED:
            self.is_valid = is_object("".join(self._arguments))
        return piece, end
