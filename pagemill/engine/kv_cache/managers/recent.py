"""`RecentBlocksManager`: what kinds have in common of which a token reads only the latest blocks.

Knows nothing about how many those are; a subclass says.
"""

from abc import abstractmethod
from collections.abc import Sequence

from pagemill.engine.kv_cache.block_pool import NULL_BLOCK
from pagemill.engine.kv_cache.managers.interface import GroupManager


class RecentBlocksManager(GroupManager):
    """A prefix is cached when the blocks are that the token behind it reads; what lies before need not be."""

    prefix_closed = False
    drops = True

    @abstractmethod
    def first_read(self, position: int) -> int:
        """Index of the first block that the token at `position` reads. Never less for a later position."""

    def cached_prefix(self, hashes: Sequence[bytes], num_blocks: int) -> list[int]:
        """Right to left, each block once: a block that is not cached rules out every end behind it, because what the
        next token reads from there begins no earlier than it does from the end that was tried."""
        end = num_blocks
        while end:
            first = self.first_read(end * self.block_size)
            run: list[int] = []
            for index in range(end - 1, first - 1, -1):
                block = self._find(hashes, index)
                if block is None:
                    end = index
                    break
                run.append(block)
            else:
                return [NULL_BLOCK] * first + run[::-1]
        return []

    def drop_out_of_window(self, request_id: str, num_computed: int) -> None:
        """Free the blocks before the first one that the token at position `num_computed` reads."""
        table = self._tables[request_id]
        start = table.num_dropped
        end = self.first_read(num_computed)
        if end <= start:
            return
        self._pool.free(table.block_ids[start:end])
        table.block_ids[start:end] = [NULL_BLOCK] * (end - start)
        table.num_dropped = end
