"""`RepetitionWatch`: ends a completion that says the same tokens again and again.
Knows tokens; the text is made by the detokenizer that it watches over."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from pagemill.messages.engine_io import FinishReason
from pagemill.messages.sampling_params import RepetitionDetectionParams
from pagemill.serve.processing.detokenizer import Detokenizer, StopMatch

STOP_REASON: Final = "repetition_detected"
_SPARE: Final = 256
"""Tokens that are noted before the last ones are moved to the beginning."""


class RepetitionWatch:
    """A detokenizer whose text also ends where its last tokens are a pattern that came often enough in a row.

    For each size of a pattern it counts how many of the last tokens equal the one that many places before; a pattern
    of size P came C times when that are (C - 1) * P. So a token costs one comparison with the tokens before it.
    """

    __slots__ = ("_inner", "_min_tokens", "_needed", "_num_tokens", "_runs", "_size", "_start", "_tokens")

    def __init__(self, inner: Detokenizer, params: RepetitionDetectionParams, min_tokens: int) -> None:
        """`min_tokens`: before so many tokens, nothing ends."""
        self._inner = inner
        self._min_tokens = min_tokens
        size = self._size = params.max_pattern_size
        self._start = max(params.min_pattern_size, 1) - 1
        self._needed = np.arange(1, size + 1) * (params.min_count - 1)
        """[P] for sizes 1 to P."""
        self._runs = np.zeros(size, np.int64)
        """[P] last tokens in a row that equal the one P places before."""
        self._tokens = np.full(size + _SPARE, -1, np.int64)
        self._num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> StopMatch | None:
        """More tokens; what ended the text with one of them, if anything did."""
        count = next((number for number, token in enumerate(token_ids, 1) if self._repeats(token)), None)
        match = self._inner.append(token_ids if count is None else token_ids[:count])
        if match is not None or count is None:
            return match
        match = self._inner.finish()
        if match is not None:
            return match._replace(num_tokens=count)  # the text's last bytes were a stop string: all tokens are kept
        return StopMatch(STOP_REASON, count, FinishReason.REPETITION)

    def finish(self) -> StopMatch | None:
        """The sequence has ended otherwise."""
        return self._inner.finish()

    def take(self) -> str:
        """The text that became certain since the last call."""
        return self._inner.take()

    def _repeats(self, token: int) -> bool:
        """Note one more token; whether it completes the last repetition of a pattern."""
        size = self._size
        tokens = self._tokens
        end = size + self._num_tokens % _SPARE
        if end == size:
            tokens[:size] = tokens[_SPARE : _SPARE + size].copy()
        self._runs = (self._runs + 1) * (tokens[end - size : end][::-1] == token)
        tokens[end] = token
        self._num_tokens += 1
        reached = (self._runs >= self._needed)[self._start :]
        return self._num_tokens >= self._min_tokens and bool(reached.any())
