"""`BlockPool`: a fixed number of blocks, who holds them, and which of them hold a known prefix.

Knows nothing about requests, groups or tokens: a block is an integer, a prefix is a key of bytes.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from pagemill.engine.kv_cache.pool_observer import PoolObserver

NULL_BLOCK = 0
"""Stands for tokens out of window. Never allocated, never freed."""


class IntegrityError(RuntimeError):
    """The bookkeeping of blocks contradicts itself: a defect, never the fault of a request."""


class BlockPool:
    """Blocks 1 to num_blocks - 1, in lists indexed by block id.

    Free blocks form a doubly linked list in the order in which they will be taken: least recently used first. The
    null block is the list's sentinel, so that no end needs a special case. A free block keeps its key until it is
    taken (lazy eviction): all idle memory is prefix cache. Equal keys may be held by several blocks, because block
    tables are append-only; the surplus ones lose their key when they are freed. `observers` are told what happens, in
    their order.
    """

    def __init__(self, num_blocks: int, observers: Sequence[PoolObserver] = ()) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} is too small: the null block and one more are needed")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_frees = 0
        """Blocks that ever became free; whoever waits for memory need not look again before this changes."""
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self.find: Callable[[bytes], int | None] = self._cached.get
        """A block that caches a key. Not a method, because a long prompt asks for thousands."""
        self._duplicates: dict[bytes, list[int]] = {}
        self._on_taken = _listeners(observers, "taken")
        self._on_used = _listeners(observers, "used")
        self._on_released = _listeners(observers, "released")
        self._on_spoiled = _listeners(observers, "spoiled")
        self._on_stored = _listeners(observers, "stored")
        self._on_removed = _listeners(observers, "removed")
        self._on_cleared = _listeners(observers, "cleared")

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - 1 - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take blocks from the head of the free list; whatever they cached is forgotten."""
        if count > self.num_free:
            raise IntegrityError(f"{count} blocks were asked for, and {self.num_free} are free")
        following = self._next
        refs = self._ref_counts
        keys = self._keys
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            if keys[block] is not None:
                self._forget(block)
            block = following[block]
        following[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self.num_free -= count
        for tell in self._on_taken:
            tell(taken)
        return taken

    def touch(self, blocks: Sequence[int]) -> None:
        """Hold cached blocks; those that were free leave the free list. The null block is skipped."""
        following = self._next
        prev = self._prev
        refs = self._ref_counts
        for tell in self._on_used:
            tell(blocks)
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if refs[block] == 0:
                before, after = prev[block], following[block]
                following[before] = after
                prev[after] = before
                self.num_free -= 1
            refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, given in order of position. They join the free list last one first: the end of a long
        prefix is less likely to be asked for again than its beginning."""
        refs = self._ref_counts
        for tell in self._on_released:
            tell(blocks)
        freed = []
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            refs[block] -= 1
            if refs[block] == 0:
                freed.append(block)
            elif refs[block] < 0:
                raise IntegrityError(f"block {block} was freed twice")
        self._append_free(freed)

    def count_held(self, blocks: Sequence[int]) -> int:
        """Those of `blocks` that somebody holds; nobody holds the null block."""
        refs = self._ref_counts
        return len(blocks) - [refs[block] for block in blocks].count(0)

    def commit(self, block: int, key: bytes) -> None:
        """From now on the block can be found by `key`."""
        if self._keys[block] is not None or self._ref_counts[block] == 0:
            raise IntegrityError(f"block {block} is free or has a key already")
        self._keys[block] = key
        if self._cached.setdefault(key, block) != block:
            self._duplicates.setdefault(key, []).append(block)
            return
        for tell in self._on_stored:
            tell(key, block)

    def forget(self, blocks: Sequence[int]) -> None:
        """From now on the blocks cannot be found; they stay with whoever holds them."""
        for block in blocks:
            self._forget(block)
        for tell in self._on_spoiled:
            tell(blocks)

    def forget_all(self) -> None:
        """Empty the prefix cache; blocks stay with whoever holds them."""
        self._keys = [None] * self.num_blocks
        self._cached.clear()
        self._duplicates.clear()
        for tell in self._on_cleared:
            tell()

    def free_blocks(self) -> list[int]:
        """Free blocks in the order in which they will be taken."""
        blocks: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(blocks) <= self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def cached_blocks(self) -> dict[int, bytes]:
        """Block -> the key it can be found by, duplicates included."""
        return {block: key for block, key in enumerate(self._keys) if key is not None}

    def ref_count(self, block: int) -> int:
        """How many hold the block."""
        return self._ref_counts[block]

    def check_integrity(self) -> None:
        """Raise IntegrityError when lists, counts and keys contradict each other. Costs O(num_blocks)."""
        free = self.free_blocks()
        unheld = [block for block in range(1, self.num_blocks) if self._ref_counts[block] == 0]
        if len(free) != self.num_free or sorted(free) != unheld:
            raise IntegrityError(
                f"free list {free} is not the blocks without holder {unheld} ({self.num_free} counted)"
            )
        chain = [NULL_BLOCK, *free, NULL_BLOCK]
        if any(self._prev[after] != before for before, after in pairwise(chain)):
            raise IntegrityError("the free list read backwards differs from itself")
        if min(self._ref_counts) < 0 or self._ref_counts[NULL_BLOCK] or self._keys[NULL_BLOCK] is not None:
            raise IntegrityError("a negative count, or the null block in use")
        found = {block: key for key, block in self._cached.items()}
        for key, blocks in self._duplicates.items():
            if not blocks or key not in self._cached or not all(self._ref_counts[block] for block in blocks):
                raise IntegrityError(f"duplicates {blocks} without a cached block, or free")
            found |= dict.fromkeys(blocks, key)
        if found != self.cached_blocks():
            raise IntegrityError("keys of blocks and the map of cached blocks differ")

    def _append_free(self, blocks: list[int]) -> None:
        following = self._next
        prev = self._prev
        duplicates = self._duplicates
        if duplicates:
            for block in blocks:
                if self._keys[block] in duplicates:
                    self._forget(block)
        last = prev[NULL_BLOCK]
        for block in blocks:
            following[last] = block
            prev[block] = last
            last = block
        following[last] = NULL_BLOCK
        prev[NULL_BLOCK] = last
        self.num_free += len(blocks)
        self.num_frees += len(blocks)

    def _forget(self, block: int) -> None:
        """Take the block's key away; a duplicate takes its place, if there is one."""
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        others = self._duplicates.get(key, [])
        if self._cached[key] != block:
            others.remove(block)
        elif others:
            self._cached[key] = others.pop(0)
        else:
            del self._cached[key]
            for tell in self._on_removed:
                tell(key, block)
        if not others:
            self._duplicates.pop(key, None)


def _listeners(observers: Sequence[PoolObserver], name: str) -> tuple[Callable[..., Any], ...]:
    """The methods of that name which do something."""
    default = getattr(PoolObserver, name)
    return tuple(getattr(observer, name) for observer in observers if getattr(type(observer), name) is not default)
