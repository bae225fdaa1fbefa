"""The view of a chat on a terminal: Markdown that is rendered while it arrives. Needs rich.

Finished blocks are printed for good and scroll away; only the unfinished one is redrawn.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from pagemill.cli.terminal import printable
from pagemill.cli.views import Write

REDRAW_INTERVAL_S = 0.08
FENCES = ("```", "~~~")


class RichView:
    """Draws on one terminal."""

    prompt = "> "

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False)

    @contextlib.contextmanager
    def answer(self) -> Iterator[Write]:
        self._console.print()
        stream = MarkdownStream(self._console)
        try:
            yield stream.write
        finally:
            stream.finish()

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def error(self, text: str) -> None:
        self._console.print(f"error: {text}", style="red", markup=False)


class MarkdownStream:
    """Markdown of which more and more is known."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._drawn_s = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def write(self, text: str) -> None:
        """Append text and, at most every REDRAW_INTERVAL_S, draw it."""
        self._text += printable(text)
        finished, self._text = split_finished(self._text)
        if finished:
            self._print(finished)
        now_s = time.monotonic()
        if finished or now_s - self._drawn_s >= REDRAW_INTERVAL_S:
            self._live.update(_Tail(self._text), refresh=True)
            self._drawn_s = now_s

    def finish(self) -> None:
        """Print what is left; the text is complete."""
        self._live.stop()
        if self._text.strip():
            self._print(self._text)

    def _print(self, markdown: str) -> None:
        self._console.print(_render(markdown))
        self._console.print()


def split_finished(text: str) -> tuple[str, str]:
    """(blocks that no further text can change, the rest): cut after the last blank line that is followed by a line
    without indent and lies outside a fenced code block."""
    fence = ""
    cut = 0
    position = 0
    after_blank = False
    for line in text.splitlines(keepends=True):
        mark = line.lstrip()[:3]
        if not fence and after_blank and line[0] not in " \t\n":
            cut = position
        if fence:
            fence = "" if mark == fence else fence
        elif mark in FENCES:
            fence = mark
        after_blank = not line.strip()
        position += len(line)
    return text[:cut], text[cut:]


class _Tail:
    """As much of a text's end as fits the screen; more could not be redrawn in place."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_render(self._text), options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def _render(text: str) -> Markdown:
    # Without hyperlinks the address of a link is shown, instead of hidden behind its text.
    return Markdown(text, code_theme="ansi_dark", hyperlinks=False)
