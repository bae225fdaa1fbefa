"""`PythonNgramIndex` and `PythonTokenTrie`: the indexes of token_index.py without compiled code, with equal results.

Slower, and larger in memory; for machines that cannot compile the kernels, and to test them.
"""

import numpy as np

from pagemill.messages.step import Int32Array

_EMPTY = np.zeros(0, np.int32)
_COMPARED = 32
_NEAR = 3
_SEEN = 8
_ALIKE = 6
"""As in token_index.cpp."""
MAX_DRAFT = 64
"""Tokens that a trie proposes at most."""


class PythonNgramIndex:
    """As `NgramIndex`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._text = _EMPTY
        self._count = 0
        self._ends: dict[bytes, int] = {}

    @property
    def num_tokens(self) -> int:
        """As `NgramIndex.num_tokens`."""
        return self._count

    def restart(self, text: Int32Array) -> None:
        """As `NgramIndex.restart`."""
        self._text = text
        self._count = 0
        self._ends = {}

    def extend(self, count: int) -> None:
        """As `NgramIndex.extend`."""
        text = self._text[:count].tobytes()
        for length in self._lengths:
            for end in range(max(self._count, length), count):
                self._ends[text[4 * (end - length) : 4 * end]] = end
        self._count = count

    def find(self, copied: int = 0) -> int:
        """As `NgramIndex.find`."""
        for length in self._lengths:
            if length < self._count:
                end = self._ends.get(self._text[self._count - length : self._count].tobytes())
                if end is not None:
                    return copied if copied and self._common(copied) > self._common(end) else end
        return self._resume(copied) if copied else 0

    def _common(self, place: int) -> int:
        """Tokens before a place that are the last ones, counted from the end."""
        length = 0
        text = self._text
        while length < min(_COMPARED, place) and text[place - 1 - length] == text[self._count - 1 - length]:
            length += 1
        return length

    def _resume(self, copied: int) -> int:
        """Where a copy goes on that differs from what it copies; 0: it does not."""
        text = self._text
        for away in range(_NEAR + 1):
            for place in (copied + away, copied - away):
                if 0 < place < self._count and text[place - 1] == text[self._count - 1]:
                    return place
        seen = min(_SEEN, copied)
        alike = text[copied - seen : copied] == text[self._count - seen : self._count]
        return copied if int(alike.sum()) >= _ALIKE else 0


class PythonTokenTrie:
    """As `TokenTrie`."""

    def __init__(self, max_depth: int, max_nodes: int) -> None:
        self._max_depth = max_depth
        self._max_nodes = max_nodes
        self.restart(_EMPTY)

    @property
    def num_tokens(self) -> int:
        """As `TokenTrie.num_tokens`."""
        return self._num_tokens

    def restart(self, text: Int32Array) -> None:
        """As `TokenTrie.restart`."""
        self._text = text
        self._num_tokens = 0
        self._active: list[int] = []
        self._children: dict[tuple[int, int], int] = {}
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._counts: list[int] = []
        self._bests: list[int] = []
        self._leaves: list[int] = []
        self._depths: list[int] = []

    def add_root(self) -> int:
        """As `TokenTrie.add_root`."""
        return self._add(-1, -1, 0, -1, 0)

    @property
    def has_room(self) -> bool:
        """As `TokenTrie.has_room`."""
        return len(self._tokens) < self._max_nodes

    def extend(self, root: int, count: int) -> int:
        """As `TokenTrie.extend`."""
        while self._num_tokens < count:
            if len(self._tokens) + 2 * (len(self._active) + 1) > self._max_nodes:
                break
            token = int(self._text[self._num_tokens])
            self._num_tokens += 1
            if token < 0:
                self._active = []
            else:
                moved = [self._move(at, token) for at in [*self._active, root]]
                self._active = [at for at in moved if at >= 0]
        return self._num_tokens

    def propose(
        self, root: int, tokens: Int32Array, most: int, factor: float, least: float, own: bool
    ) -> tuple[Int32Array, float]:
        """As `TokenTrie.propose`."""
        best: list[int] = []
        score = 0.0
        known = tokens[-self._max_depth :].tolist()
        for match in range(1, min(len(tokens), self._max_depth - 1) + 1):
            found = self._walk(root, known[len(known) - match :])
            if found is None:
                break
            node, behind = found
            total = self._counts[node] - own
            if total <= 0 or (own and behind >= self._num_tokens):
                break
            limit = min(int(match * factor), most, self._max_depth - match, MAX_DRAFT)
            draft, expected = self._likely(node, behind, total, limit, least)
            if draft and expected >= score:
                best = draft
                score = expected
        return np.array(best, np.int32), score

    def counts(self) -> dict[tuple[int, ...], int]:
        """As `TokenTrie.counts`."""
        found: dict[int, tuple[int, ...]] = {}
        for number, (parent, token) in enumerate(zip(self._parents, self._tokens, strict=True)):
            found[number] = (number,) if parent < 0 else (*found[parent], token)
        return {path: self._counts[number] for number, path in found.items() if self._parents[number] >= 0}

    def _move(self, at: int, token: int) -> int:
        """From a string to one with a token more; the node if it was seen before and may become longer, else -1."""
        leaf = self._leaves[at]
        if leaf >= 0:
            after = int(self._text[leaf])
            if after >= 0:
                self._add(at, after, 1, leaf + 1, self._depths[at] + 1)
            self._leaves[at] = -1
        child = self._children.get((at, token), -1)
        if child < 0:
            self._add(at, token, 1, self._num_tokens, self._depths[at] + 1)
            return -1
        self._counts[child] += 1
        if self._counts[child] >= self._counts[self._bests[at]]:
            self._bests[at] = child
        return child if self._depths[child] < self._max_depth else -1

    def _add(self, parent: int, token: int, count: int, leaf: int, depth: int) -> int:
        made = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._counts.append(count)
        self._bests.append(-1)
        self._leaves.append(leaf)
        self._depths.append(depth)
        if parent >= 0:
            self._children[parent, token] = made
            best = self._bests[parent]
            if best < 0 or self._counts[best] <= 1:
                self._bests[parent] = made
        return made

    def _walk(self, root: int, tokens: list[int]) -> tuple[int, int] | None:
        """The node that stands for the tokens, and where they go on in the text if it is a leaf, else -1."""
        node = root
        behind = -1
        for token in tokens:
            if behind >= 0:
                if behind >= self._num_tokens or self._text[behind] != token:
                    return None
                behind += 1
                continue
            node = self._children.get((node, token), -1)
            if node < 0:
                return None
            behind = self._leaves[node]
        return node, behind

    def _likely(self, node: int, behind: int, total: int, limit: int, least: float) -> tuple[list[int], float]:
        """The most likely tokens from a place that was seen `total` times, and how many are expected to come true."""
        draft: list[int] = []
        chance = 1.0
        expected = 0.0
        while len(draft) < limit:
            best = -1 if behind >= 0 else self._bests[node]
            if behind >= 0:
                if behind >= self._num_tokens or self._text[behind] < 0:
                    break
            elif best < 0:
                break
            times = 1 if behind >= 0 else self._counts[best]
            chance *= times / total
            if chance < least:
                break
            expected += chance
            total = times
            if behind >= 0:
                draft.append(int(self._text[behind]))
                behind += 1
            else:
                draft.append(self._tokens[best])
                node = best
                behind = self._leaves[best]
        return draft, expected
