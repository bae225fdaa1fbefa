"""`NgramProposer`: what followed the last tokens when they were said before, in the prompt or the output of the same
request (prompt lookup). Knows no model."""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pagemill.errors import ConfigError
from pagemill.messages.step import Int32Array
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext


class NgramProposer(Proposer):
    """Of several places it takes the last. Reads all tokens of a slot for each guess."""

    def __init__(self, context: ProposerContext) -> None:
        self._states = context.states
        self._max_drafts = context.max_drafts
        self._shortest = context.settings.prompt_lookup_min
        self._longest = context.settings.prompt_lookup_max
        if self._shortest > self._longest:
            raise ConfigError(f"prompt_lookup_min={self._shortest} is more than prompt_lookup_max={self._longest}")

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        states = self._states
        return [self._after(states.token_ids[slot, : states.num_tokens[slot]]) for slot in slots.tolist()]

    def _after(self, tokens: Int32Array) -> Int32Array:
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            before = sliding_window_view(tokens[:-1], length)
            places = np.flatnonzero((before == tokens[-length:]).all(axis=1))
            if len(places):
                start = int(places[-1]) + length
                return tokens[start : start + self._max_drafts].copy()
        return tokens[:0]
