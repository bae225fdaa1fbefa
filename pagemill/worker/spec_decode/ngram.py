"""`NgramProposer`: what followed the last tokens when they were said before, in the prompt or the output of the same
request (prompt lookup decoding, Saxena 2023). Knows no model."""

from collections.abc import Sequence

import numpy as np

from pagemill.errors import ConfigError
from pagemill.messages.step import Int32Array, NewRequest
from pagemill.worker.spec_decode.index_reference import PythonNgramIndex
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext
from pagemill.worker.spec_decode.token_index import NgramIndex, follow_all, ngram_index

REMEMBERED = 16
"""Tokens after which it is forgotten what a text copied, where it was not found again."""
FEW = 8
"""Slots for which arrays are slower than one after the other."""
LONGEST = 32
"""Tokens that may be looked for: each length takes 8 to 16 bytes for each token of a text."""


class NgramProposer(Proposer):
    """The longest match counts, and of several places the one that the text copies already, or the last. A copy goes on
    where it differs in a few tokens. A guess costs a look for each length, however long the text is; the index grows
    with the slot's tokens."""

    repeats = True

    def __init__(self, context: ProposerContext) -> None:
        """Raises ConfigError for lengths that cannot be looked for."""
        settings = context.settings
        self._shortest = settings.prompt_lookup_min
        self._longest = settings.prompt_lookup_max
        if not 1 <= self._shortest <= self._longest <= LONGEST:
            raise ConfigError(
                f"prompt_lookup_min {self._shortest} and prompt_lookup_max {self._longest}: "
                f"1 <= prompt_lookup_min <= prompt_lookup_max <= {LONGEST} is allowed"
            )
        self._states = context.states
        self._max_drafts = context.max_drafts
        self._places = np.arange(context.max_drafts)
        self._indexes: list[NgramIndex | PythonNgramIndex | None] = [None] * len(context.states.num_tokens)
        """By slot; None: nothing is known of its tokens yet."""
        self._copies = [(0, 0)] * len(self._indexes)
        """By slot: how many tokens before its end it found what it may copy, and how many tokens it had then."""

    def begin(self, new: NewRequest) -> None:
        """Its tokens are read when something is proposed."""
        self._indexes[new.slot] = None
        self._copies[new.slot] = (0, 0)

    def replace(self, slot: int, position: int) -> None:
        """The index begins anew where it has tokens that are no more."""
        index = self._indexes[slot]
        if index is not None and position < index.num_tokens:
            self._indexes[slot] = None
            self._copies[slot] = (0, 0)

    def end(self, slot: int) -> None:
        """Its memory is free."""
        self._indexes[slot] = None

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        """What followed, of each slot."""
        rows = slots.tolist()
        counts: list[int] = self._states.num_tokens[slots].tolist()
        if len(rows) > FEW:
            return self._propose_many(slots, rows, counts)
        token_ids = self._states.token_ids
        found: list[Int32Array] = []
        for slot, count in zip(rows, counts, strict=True):
            index = self._indexes[slot] or self._begin_index(slot)
            index.extend(count)
            start = index.find(self._copied(slot, count))
            if not start:
                found.append(token_ids[slot, :0])
                continue
            self._copies[slot] = (count - start, count)
            if start + self._max_drafts <= count:
                found.append(token_ids[slot, start : start + self._max_drafts].copy())
            else:  # a text that repeats its last tokens is taken to go on with that
                found.append(token_ids[slot, start + self._places % (count - start)])
        return found

    def _propose_many(self, slots: Int32Array, rows: list[int], counts: list[int]) -> Sequence[Int32Array]:
        """The same by arrays."""
        indexes = [self._indexes[slot] or self._begin_index(slot) for slot in rows]
        copied = [self._copied(slot, count) for slot, count in zip(rows, counts, strict=True)]
        starts = follow_all(indexes, counts, copied)
        for slot, count, start in zip(rows, counts, starts, strict=True):
            if start:
                self._copies[slot] = (count - start, count)
        begins = np.array(starts)
        places = begins[:, None] + self._places % (np.array(counts) - begins)[:, None]
        guesses = self._states.token_ids[slots[:, None], places]
        nothing = slots[:0]
        return [guess if start else nothing for guess, start in zip(guesses, starts, strict=True)]

    def _begin_index(self, slot: int) -> NgramIndex | PythonNgramIndex:
        """Of a slot that has none; nothing is in it yet."""
        index = self._indexes[slot] = ngram_index(self._shortest, self._longest)
        index.restart(self._states.token_ids[slot])
        return index

    def _copied(self, slot: int, count: int) -> int:
        """Where a slot of so many tokens would go on with what it copied before; 0: nowhere."""
        distance, found_at = self._copies[slot]
        return count - distance if distance and count - found_at <= REMEMBERED else 0
