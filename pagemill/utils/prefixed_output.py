"""`PrefixedOutput`: a text stream that begins every line with a prefix. Does not know what is written."""

import io
import threading
from typing import TextIO


class PrefixedOutput(io.TextIOBase):
    """Writes whole lines to `stream`, which stays open when this is closed; the beginning of a line waits for its end,
    or for `flush`. So lines of several threads and processes are not mixed up."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._lock = threading.RLock()  # a signal handler may write while the thread it interrupts does
        self._pending = ""
        self._at_line_start = True

    def write(self, text: str) -> int:
        """Pass on the lines that are complete."""
        with self._lock:
            lines, newline, self._pending = (self._pending + text).rpartition("\n")
            if newline:
                self._put(lines + newline)
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Pass on the beginning of a line, too."""
        with self._lock:
            pending, self._pending = self._pending, ""
            if pending:
                self._put(pending)
            self._stream.flush()

    def fileno(self) -> int:
        """The stream's."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """The stream's."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """True: this is for writing."""
        return True

    def _put(self, text: str) -> None:
        start = self._prefix if self._at_line_start else ""
        self._at_line_start = text.endswith("\n")
        body = text.removesuffix("\n")
        self._stream.write(start + body.replace("\n", "\n" + self._prefix) + text[len(body) :])
