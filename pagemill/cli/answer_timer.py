"""Times one streamed answer. Knows pieces and the clock, not where they come from."""

import time
from collections.abc import Callable

from pagemill.cli.session import Delta, Usage


class AnswerTimer:
    """Started when it is made; told of every piece."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start_s = clock()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._num_pieces = 0
        self._usage: Usage | None = None

    def saw(self, delta: Delta) -> None:
        """Count a piece as having arrived now."""
        self._usage = delta.usage or self._usage
        if not delta.text:
            return
        self._last_s = self._clock()
        self._num_pieces += 1
        if self._first_s is None:
            self._first_s = self._last_s

    def summary(self) -> str:
        """`24 tokens, 52.1 tokens/s, first token after 0.41 s`; the rate is that of the tokens after the first.

        Without usage (an answer that was stopped) the pieces are counted, which are at most as many as the tokens.
        """
        if self._first_s is None:
            return "no tokens"
        num_tokens = self._usage.completion_tokens if self._usage else self._num_pieces
        parts = [f"{num_tokens} token{'' if num_tokens == 1 else 's'}"]
        if num_tokens > 1 and self._last_s > self._first_s:
            parts.append(f"{(num_tokens - 1) / (self._last_s - self._first_s):.1f} tokens/s")
        parts.append(f"first token after {self._first_s - self._start_s:.2f} s")
        return ", ".join(parts)
