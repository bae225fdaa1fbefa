"""How a chat looks: rich on a terminal, plain text elsewhere. Knows text and figures, not the conversation."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, TextIO

Write = Callable[[str], None]


class View(Protocol):
    """Where a chat is shown."""

    prompt: str
    """What invites the user to type."""

    def answer(self) -> AbstractContextManager[Write]:
        """A context for one answer; it gives the function that shows a piece of it."""

    def note(self, text: str) -> None:
        """Show something that is not part of the conversation."""

    def error(self, text: str) -> None:
        """Show what went wrong."""


class PlainView:
    """Answers and nothing else, for pipes; notes are left out and errors go to standard error."""

    prompt = ""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    @contextlib.contextmanager
    def answer(self) -> Iterator[Write]:
        try:
            yield self._write
        finally:
            self._write("\n")

    def note(self, text: str) -> None:
        pass

    def error(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def make_view(out: TextIO) -> View:
    """The view that suits the stream."""
    if out.isatty():
        from pagemill.cli.rich_view import RichView  # deferred: rich

        return RichView(out)
    return PlainView(out)
