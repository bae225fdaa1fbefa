"""`OutputWatch`: what the bytes of an output say of where it stands: in its reasoning, or where a grammar begins.
Knows no grammar."""

import re
from collections import deque
from collections.abc import Callable, Sequence

from pagemill.messages.structured_outputs import GrammarSpec

BytesOf = Callable[[int], bytes]
"""A token -> its bytes; of a control token CONTROL and its name."""
_NEVER = re.compile(rb"(?!)")


class OutputWatch:
    """Sees each token once. Keeps as many bytes as the longest mark has."""

    def __init__(self, spec: GrammarSpec, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._thinking = thinking = spec.thinking
        begins = (thinking.begin,) if thinking is not None else ()
        anywhere = spec.triggers + (begins if thinking is not None and thinking.again else ())
        self._begins = frozenset(begins)
        self._anywhere = _any_of(anywhere)
        firsts = spec.first_triggers + begins
        self._first = _any_of(firsts)
        self._longest_first = max(map(len, firsts), default=0)
        self._end = _any_of((thinking.end,) if thinking is not None else ())
        self._longest = max(map(len, (*anywhere, *firsts, thinking.end if thinking is not None else b"")))
        self.is_thinking = thinking is not None and thinking.is_open
        """Whether the output reasons now."""
        self._num_thought = 0
        """Tokens of this reasoning."""
        self._num_forced = 0
        """Of its end."""
        self._at_start = not self.is_thinking
        """Whether nothing but white space has come since the beginning, or the end of the reasoning."""
        self._text = b""
        """The last bytes, in which no mark has been found yet."""
        self._tokens: deque[tuple[int, int]] = deque()
        """Tokens that `_text` is of, and how many of its bytes."""

    def take(self, token: int) -> Sequence[int]:
        """The output goes on with this token. The tokens from the beginning of a trigger on, where one is complete."""
        found = self._bytes_of(token)
        forced = self.forced
        if self.is_thinking:
            self._num_thought += 1
        self._text += found
        self._tokens.append((token, len(found)))
        tokens = self._find()
        if forced and self.is_thinking:
            self._num_forced = self._num_forced + 1 if token == forced[0] else 0
            if len(forced) == 1 and self._num_forced:
                self._end_thinking(len(self._text))
        self._trim()
        return tokens

    @property
    def forced(self) -> Sequence[int]:
        """What is left of the end of a reasoning that has had its budget; none while it has not."""
        thinking = self._thinking
        if thinking is None or thinking.budget is None or not self.is_thinking or self._num_thought < thinking.budget:
            return ()
        return thinking.end_ids[self._num_forced :]

    def _find(self) -> Sequence[int]:
        """Go through the marks in the text."""
        while True:
            if self.is_thinking:
                end = self._end.search(self._text)
                if end is None:
                    return ()
                self._end_thinking(end.end())
                continue
            found = self._begun()
            if found is None:
                return ()
            if found.group() in self._begins:
                self.is_thinking = True
                self._num_thought = self._num_forced = 0
                self._forget(found.end())
                continue
            self._forget(found.start())
            tokens = [token for token, _ in self._tokens]
            self._forget(1)
            return tokens

    def _begun(self) -> re.Match[bytes] | None:
        """The next mark outside of reasoning."""
        if self._at_start:
            self._forget(len(self._text) - len(self._text.lstrip()))
            first = self._first.match(self._text)
            if first is not None:
                return first
        return self._anywhere.search(self._text)

    def _end_thinking(self, place: int) -> None:
        self.is_thinking = False
        self._at_start = True
        self._num_thought = self._num_forced = 0
        self._forget(place)

    def _trim(self) -> None:
        if not self.is_thinking and len(self._text) >= self._longest_first and self._text.strip():
            self._at_start = False
        if not self._at_start:
            self._forget(len(self._text) - self._longest + 1)

    def _forget(self, count: int) -> None:
        """The first bytes of the text, and the tokens that were of these alone."""
        if count <= 0:
            return
        self._text = self._text[count:]
        while self._tokens and self._tokens[0][1] <= count:
            count -= self._tokens.popleft()[1]
        if self._tokens and count:
            token, size = self._tokens[0]
            self._tokens[0] = (token, size - count)


def _any_of(marks: Sequence[bytes]) -> re.Pattern[bytes]:
    longest = sorted((mark for mark in set(marks) if mark), key=len, reverse=True)
    return re.compile(b"|".join(map(re.escape, longest))) if longest else _NEVER
