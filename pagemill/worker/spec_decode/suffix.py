"""`SuffixProposer`: what most often followed the longest end of a text that was seen before, in the same request or in
outputs of former ones (suffix decoding: Oliaro et al., arXiv 2411.04975). Knows no model.

Outputs of former requests are known only to requests with the same cache salt: who may not learn from the time an
answer takes which prefixes others have used learns nothing of what others were answered either.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from pagemill.errors import ConfigError
from pagemill.messages.step import Int32Array, NewRequest
from pagemill.worker.spec_decode.index_reference import PythonTokenTrie
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext, Speculation
from pagemill.worker.spec_decode.token_index import TokenTrie, token_trie

DEEPEST = 64
"""Tokens that may be looked for, with those proposed."""
PAST_NODES = 1 << 20
"""Nodes of each of two halves of the memory of past outputs: 32 MiB."""
PAST_TOKENS = 1 << 21
"""Tokens of each half: 8 MiB."""
NODES_PER_TOKEN = 8
"""Of a request's own trie, at most, for each token that its text may have: a quarter of a KiB."""


class SuffixProposer(Proposer):
    """The request's own text and the past outputs of its salt are asked; the guess of which more is expected counts,
    its own if they are equal. A guess costs no more than the square of the depth of looks into a table."""

    repeats = True

    def __init__(self, context: ProposerContext) -> None:
        """Raises ConfigError for settings that are out of range."""
        self._settings = _checked(context.settings)
        self._states = context.states
        self._max_drafts = context.max_drafts
        num_slots, most_tokens = context.states.token_ids.shape
        self._max_nodes = NODES_PER_TOKEN * most_tokens + 1024
        self._own: list[OwnText | None] = [None] * num_slots
        """By slot; None: nothing is known of its tokens yet."""
        self._salts: list[str | None] = [None] * num_slots
        self._ended = np.ones(num_slots, bool)
        self._past = PastOutputs(
            self._settings.suffix_decoding_max_tree_depth,
            self._settings.suffix_decoding_max_cached_requests,
            PAST_NODES,
            PAST_TOKENS,
        )

    def begin(self, new: NewRequest) -> None:
        """Its tokens are read when something is proposed."""
        self._own[new.slot] = None
        self._salts[new.slot] = new.cache_salt
        self._ended[new.slot] = False

    def replace(self, slot: int, position: int) -> None:
        """What is known begins anew where it has tokens that are no more."""
        own = self._own[slot]
        if own is not None and position < own.num_tokens:
            self._own[slot] = None

    def end(self, slot: int) -> None:
        """The output becomes a past one."""
        if self._ended[slot]:
            return
        self._ended[slot] = True
        self._own[slot] = None
        states = self._states
        start = int(states.num_prompt_tokens[slot])
        self._past.add(self._salts[slot], states.token_ids[slot, start : states.num_tokens[slot]])

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        """What may follow, of each slot."""
        settings = self._settings
        states = self._states
        limits = (
            self._max_drafts,
            settings.suffix_decoding_max_spec_factor,
            settings.suffix_decoding_min_token_prob,
        )
        found = []
        for slot, count in zip(slots.tolist(), states.num_tokens[slots].tolist(), strict=True):
            text = states.token_ids[slot]
            own = self._own[slot]
            if own is None:
                own = self._own[slot] = OwnText(text, settings.suffix_decoding_max_tree_depth, self._max_nodes)
            own.extend(count)
            last = text[max(0, count - settings.suffix_decoding_max_tree_depth) : count]
            best, expected = own.trie.propose(own.root, last, *limits, True)
            past, more = self._past.propose(self._salts[slot], last, *limits)
            found.append(past if more > expected else best)
        return found


class PastOutputs:
    """Outputs of requests that have ended, by the salt of their requests. Two halves: when the younger one is full,
    the older one is forgotten and it takes its place. So the memory is bounded, and nothing is taken out of a trie."""

    def __init__(self, max_depth: int, max_outputs: int, max_nodes: int, max_tokens: int) -> None:
        """`max_outputs`: of both halves, 0 for none; `max_nodes` and `max_tokens`: of each."""
        self._max_outputs = max_outputs
        self._make = partial(_Half, max_depth, max_nodes, max_tokens)
        self._halves: list[_Half] = []
        """The younger one first."""

    @property
    def num_outputs(self) -> int:
        """That are remembered, in whole or in part."""
        return sum(half.num_outputs for half in self._halves)

    def add(self, salt: str | None, token_ids: Int32Array) -> None:
        """Remember the [N] tokens of an output."""
        if self._max_outputs == 0:
            return
        while len(token_ids) > 1:  # one token is followed by nothing
            if not self._halves or self._halves[0].num_outputs >= max(1, self._max_outputs // 2):
                self._turn()
            taken = self._halves[0].add(salt, token_ids)
            token_ids = token_ids[taken:]
            if len(token_ids):
                self._turn()

    def propose(
        self, salt: str | None, last: Int32Array, most: int, factor: float, least: float
    ) -> tuple[Int32Array, float]:
        """As `TokenTrie.propose`: the younger half's, unless more is expected of the older one's."""
        best, expected = last[:0], 0.0
        for half in self._halves:
            root = half.roots.get(salt)
            if root is not None:
                found, more = half.trie.propose(root, last, most, factor, least, False)
                if more > expected:
                    best, expected = found, more
        return best, expected

    def _turn(self) -> None:
        num_kept = 1 if self._max_outputs > 1 else 0
        self._halves = [self._make(), *self._halves[:num_kept]]


class _Half:
    def __init__(self, max_depth: int, max_nodes: int, max_tokens: int) -> None:
        self.trie = token_trie(max_depth, max_nodes)
        self.roots: dict[str | None, int] = {}
        self.num_outputs = 0
        self._text = np.zeros(max_tokens, np.int32)  # the system gives memory when it is first written
        self._count = 0
        self.trie.restart(self._text)

    def add(self, salt: str | None, token_ids: Int32Array) -> int:
        """How many tokens are in, at least one if it is the first output: fewer than all where there is no room."""
        if salt not in self.roots:
            if not self.trie.has_room:
                return 0
            self.roots[salt] = self.trie.add_root()
        count = min(len(token_ids), len(self._text) - self._count - 1)
        if count <= 0:
            return 0
        end = self._count + count
        self._text[self._count : end] = token_ids[:count]
        self._text[end] = -1
        reached = self.trie.extend(self.roots[salt], end + 1)
        self.num_outputs += 1
        taken = min(reached, end) - self._count
        if reached <= end:
            self._count = len(self._text)  # there is no node left, so that it takes no more
        else:
            self._count = end + 1
        return taken


class OwnText:
    """What was seen in a slot's text. When there are too many nodes, the older half of the text is forgotten."""

    def __init__(self, text: Int32Array, max_depth: int, max_nodes: int) -> None:
        self.trie: TokenTrie | PythonTokenTrie = token_trie(max_depth, max_nodes)
        self.root = 0
        self._text = text
        self._start = 0
        self._restart(0)

    @property
    def num_tokens(self) -> int:
        """Of the text, that are in or forgotten."""
        return self._start + self.trie.num_tokens

    def extend(self, count: int) -> None:
        """The text has `count` tokens."""
        while (reached := self.trie.extend(self.root, count - self._start)) < count - self._start:
            self._restart(self._start + (reached + 1) // 2)

    def _restart(self, start: int) -> None:
        self._start = start
        self.trie.restart(self._text[start:])
        self.root = self.trie.add_root()


def _checked(settings: Speculation) -> Speculation:
    """Raises ConfigError for what is out of range."""
    depth = settings.suffix_decoding_max_tree_depth
    if not 2 <= depth <= DEEPEST:
        raise ConfigError(f"suffix_decoding_max_tree_depth {depth}: 2 to {DEEPEST} is allowed")
    if settings.suffix_decoding_max_cached_requests < 0:
        raise ConfigError(
            f"suffix_decoding_max_cached_requests {settings.suffix_decoding_max_cached_requests}: "
            "0 (none) or more is allowed"
        )
    if not 0 <= settings.suffix_decoding_max_spec_factor <= DEEPEST:
        raise ConfigError(
            f"suffix_decoding_max_spec_factor {settings.suffix_decoding_max_spec_factor}: 0 to {DEEPEST} is allowed"
        )
    if not 0 <= settings.suffix_decoding_min_token_prob <= 1:
        raise ConfigError(
            f"suffix_decoding_min_token_prob {settings.suffix_decoding_min_token_prob}: 0 to 1 is allowed"
        )
    return settings
