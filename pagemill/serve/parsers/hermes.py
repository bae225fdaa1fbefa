"""Tool calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen2.5, Qwen3, SmolLM.

Arguments are passed on as they arrive, character by character. What begins like a call and turns out to be none before
its arguments have begun is content.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import ClassVar

from pagemill.serve.parsers.interface import Delta, MessageForm, ToolCallDelta, merged
from pagemill.serve.parsers.json_call import JsonCall
from pagemill.serve.parsers.json_scan import Scan
from pagemill.serve.parsers.text_scan import MarkerFinder, SpaceHolder

BEGIN = "<tool_call>"
END = "</tool_call>"
CHUNK_CHARS = 4096
"""Looked at in one go: what follows a mark is copied, and a hostile text may be all marks."""


class _Part(Enum):
    CONTENT = auto()
    CALL = auto()
    """Between the marks."""
    ENDING = auto()
    """After the call's JSON; END may follow."""


class HermesParser:
    """Implements `MessageParser`. Content is passed on as it is, but for white space next to a call."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)

    def __init__(self, form: MessageForm) -> None:
        self._parallel = form.parallel_tool_calls
        self._begin = MarkerFinder(BEGIN)
        self._space = SpaceHolder()
        self._part = _Part.CONTENT
        self._call = JsonCall()
        self._before_call = ""
        """White space that was held back when the call began."""
        self._ending = ""
        """The text while the part is ENDING."""
        self._num_calls = 0
        self._follows_call = False
        """Whether no content was passed on since the last call."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """See `MessageParser`."""
        deltas: list[Delta] = []
        for start in range(0, len(text), CHUNK_CHARS):
            self._read(text[start : start + CHUNK_CHARS], deltas)
        return merged(deltas)

    def finish(self) -> list[Delta]:
        """See `MessageParser`."""
        deltas: list[Delta] = []
        if self._part is _Part.CALL and not self._call.is_told:
            self._give_back(deltas)
        elif self._part is _Part.ENDING:
            self._part = _Part.CONTENT
            self._say(self._ending, deltas)
        self._say(self._begin.release(), deltas)
        space = self._space.release()
        if space and not self._follows_call:
            deltas.append(Delta(content=space))
        return merged(deltas)

    def _read(self, text: str, deltas: list[Delta]) -> None:
        while text:
            match self._part:
                case _Part.CONTENT:
                    text = self._read_content(text, deltas)
                case _Part.CALL:
                    text = self._read_call(text, deltas)
                case _Part.ENDING:
                    text = self._read_ending(text, deltas)

    def _read_content(self, text: str, deltas: list[Delta]) -> str:
        content, rest = self._begin.feed(text)
        self._say(content, deltas)
        if rest is None:
            return ""
        self._part = _Part.CALL
        self._call = JsonCall()
        self._before_call = self._space.release()
        return rest

    def _read_call(self, text: str, deltas: list[Delta]) -> str:
        call = self._call
        was_told = call.is_told
        arguments, rest = call.feed(text)
        if call.is_told and (self._parallel or self._num_calls == 0):
            name = None if was_told else call.name
            is_complete = call.status is Scan.ENDED and call.is_valid
            if name or arguments or is_complete:
                deltas.append(Delta(tool_call=ToolCallDelta(self._num_calls, name, arguments, is_complete)))
        if call.status is Scan.FAILED and not call.is_told:
            self._give_back(deltas)
        elif call.status is not Scan.OPEN:
            self._part = _Part.ENDING
            self._ending = ""
            self._num_calls += 1
            self._follows_call = True
        return rest

    def _read_ending(self, text: str, deltas: list[Delta]) -> str:
        if not self._ending:
            text = text.lstrip()
        self._ending += text
        if self._ending.startswith(END):
            self._part = _Part.CONTENT
            return self._ending[len(END) :]
        if not END.startswith(self._ending):
            self._part = _Part.CONTENT
            return self._ending
        return ""

    def _give_back(self, deltas: list[Delta]) -> None:
        """What was read since BEGIN is no call, and content after all."""
        self._part = _Part.CONTENT
        self._say(self._before_call + BEGIN + self._call.text, deltas)

    def _say(self, content: str, deltas: list[Delta]) -> None:
        """Pass on content, but for white space at its end."""
        shown = self._space.feed(content)
        if shown:
            self._follows_call = False
            deltas.append(Delta(content=shown))
