"""Reasoning between `<think>` and `</think>`, before the content. White space around either is no part of it.

The template may have opened the reasoning already, as that of Qwen3-Thinking and DeepSeek-R1 does; or closed it, as
that of Qwen3 does when thinking is switched off.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import ClassVar

from pagemill.serve.parsers.interface import Delta, MessageForm
from pagemill.serve.parsers.text_scan import MarkerFinder, SpaceHolder

BEGIN = "<think>"
END = "</think>"


class _Part(Enum):
    START = auto()
    """Nothing but white space, and perhaps the beginning of `<think>`."""
    REASONING = auto()
    BETWEEN = auto()
    """After `</think>`, before the content."""
    CONTENT = auto()


class Qwen3Parser:
    """Implements `MessageParser`. A message reasons if it, or the prompt before it, begins with `<think>`."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)
    reasons_unasked: ClassVar[bool] = False
    """Whether a message that begins with neither mark is reasoning."""

    def __init__(self, form: MessageForm) -> None:
        self._end = MarkerFinder(END)
        self._space = SpaceHolder()
        self._lead: list[str] = []
        """White space while the part is START."""
        self._mark = ""
        """What follows it then."""
        self._part = _first_part(form)
        self._has_reasoned = False

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """See `MessageParser`."""
        deltas: list[Delta] = []
        if self._part is _Part.START:
            text = self._begin(text)
        if self._part is _Part.REASONING and text:
            reasoning, rest = self._end.feed(text)
            if shown := self._trimmed(reasoning):
                deltas.append(Delta(reasoning=shown))
            text = rest or ""
            if rest is not None:
                self._part = _Part.BETWEEN
        if self._part is _Part.BETWEEN and (text := text.lstrip()):
            self._part = _Part.CONTENT
        if self._part is _Part.CONTENT and text:
            deltas.append(Delta(content=text))
        return deltas

    def finish(self) -> list[Delta]:
        """See `MessageParser`."""
        if self._part is _Part.START:
            rest = self._undecided()
            if not self.reasons_unasked:
                return [Delta(content=rest)] if rest else []
        else:
            rest = self._end.release()
        shown = self._trimmed(rest)
        return [Delta(reasoning=shown)] if shown else []

    def _begin(self, piece: str) -> str:
        """What is left to be looked at, once it is known whether it is reasoning."""
        if not self._mark:
            text = piece.lstrip()
            self._lead.append(piece[: len(piece) - len(text)])
            piece = text
        self._mark += piece
        if self._mark.startswith(BEGIN):
            self._part = _Part.REASONING
            return self._mark[len(BEGIN) :]
        if BEGIN.startswith(self._mark):
            return ""
        self._part = _Part.REASONING if self.reasons_unasked else _Part.CONTENT
        return self._undecided()

    def _undecided(self) -> str:
        """The text while the part was START."""
        return "".join(self._lead) + self._mark

    def _trimmed(self, piece: str) -> str:
        """Reasoning without the white space around it."""
        if not self._has_reasoned:
            piece = piece.lstrip()
            self._has_reasoned = bool(piece)
        return self._space.feed(piece)


class DeepSeekR1Parser(Qwen3Parser):
    """Implements `MessageParser`. A message reasons up to `</think>`, whether or not `<think>` is there."""

    reasons_unasked: ClassVar[bool] = True


def _first_part(form: MessageForm) -> _Part:
    """Where the prompt leaves off."""
    if form.begun:
        ended = form.begun.rfind(END)
        if ended >= 0:
            return _Part.CONTENT
        return _Part.REASONING if BEGIN in form.begun else _Part.START
    end = form.prompt_end.rstrip()
    if end.endswith(END):
        return _Part.BETWEEN
    return _Part.REASONING if end.endswith(BEGIN) else _Part.START
