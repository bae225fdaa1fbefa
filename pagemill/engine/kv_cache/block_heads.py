"""`BlockHeads`: which blocks begin with which tokens after the same past, found by the longest common beginning.

Knows nothing about requests, groups or who holds a block: a past is a key of bytes, and so are tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from pagemill.engine.kv_cache.block_pool import NULL_BLOCK, IntegrityError
from pagemill.engine.kv_cache.pool_observer import PoolObserver

TOKEN_BYTES = 4


class BlockHeads(PoolObserver):
    """An index over blocks of a pool. Tokens are int32, packed.

    Blocks with the same past are kept in the lexicographic order of their tokens: the one with most of its beginning
    in common with a query is a neighbour of the place where the query would be. Finding, adding and removing cost
    O(log n) comparisons in the number of blocks with that past.

    What is added is found from the next step on: only then is it computed before anything that the step does. As an
    observer of the pool, it forgets a block that is taken or spoiled.
    """

    def __init__(self, num_blocks: int) -> None:
        self._pasts: list[bytes | None] = [None] * num_blocks
        self._tokens: list[bytes] = [b""] * num_blocks
        self._by_past: dict[bytes, list[int]] = {}
        self._added: dict[int, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        """Blocks that can be found."""
        return sum(map(len, self._by_past.values()))

    def add(self, block: int, past: bytes, tokens: bytes) -> None:
        """By the end of this step the block begins with `tokens`; what was said of it before remains true."""
        self._added[block] = (past, tokens)

    def begin_step(self) -> None:
        """A step is going to be scheduled: blocks added before can be found now."""
        for block, (past, tokens) in self._added.items():
            self._remove(block)
            self._pasts[block] = past
            self._tokens[block] = tokens
            siblings = self._by_past.setdefault(past, [])
            siblings.insert(bisect_left(siblings, tokens, key=self._tokens.__getitem__), block)
        self._added.clear()

    def longest(self, past: bytes, tokens: bytes) -> tuple[int, int]:
        """A block with this past that has most leading tokens in common with `tokens`, and how many; (NULL_BLOCK, 0)
        when none has any."""
        siblings = self._by_past.get(past, [])
        at = bisect_left(siblings, tokens, key=self._tokens.__getitem__)
        best = NULL_BLOCK
        most = 0
        for block in siblings[max(0, at - 1) : at + 1]:
            count = _num_equal(self._tokens[block], tokens)
            if count > most:
                best = block
                most = count
        return best, most

    def taken(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._added.pop(block, None)
            self._remove(block)

    def spoiled(self, blocks: Sequence[int]) -> None:
        self.taken(blocks)

    def cleared(self) -> None:
        self._pasts = [None] * len(self._pasts)
        self._tokens = [b""] * len(self._tokens)
        self._by_past.clear()
        self._added.clear()

    def check_integrity(self) -> None:
        """Raise IntegrityError when the index contradicts itself. Costs O(blocks)."""
        for past, siblings in self._by_past.items():
            heads = [self._tokens[block] for block in siblings]
            if not siblings or heads != sorted(heads) or any(self._pasts[block] != past for block in siblings):
                raise IntegrityError(f"blocks {siblings} are not the sorted ones of one past")
        if len(self) != sum(past is not None for past in self._pasts):
            raise IntegrityError(f"{len(self)} blocks can be found, and others have a past")

    def _remove(self, block: int) -> None:
        past = self._pasts[block]
        if past is None:
            return
        siblings = self._by_past[past]
        at = bisect_left(siblings, self._tokens[block], key=self._tokens.__getitem__)
        del siblings[siblings.index(block, at)]
        if not siblings:
            del self._by_past[past]
        self._pasts[block] = None
        self._tokens[block] = b""


def _num_equal(one: bytes, other: bytes) -> int:
    """Leading tokens that both have."""
    count = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    return int(differ.argmax()) if differ.any() else count
