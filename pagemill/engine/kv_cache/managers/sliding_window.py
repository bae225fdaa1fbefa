"""`SlidingWindowManager`: only the last `window` tokens are kept, the current one included.

Knows nothing about other groups of the same request.
"""

from collections.abc import Sequence

from pagemill.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from pagemill.engine.kv_cache.managers.interface import GroupManager
from pagemill.engine.kv_cache.planning import peak_blocks
from pagemill.messages.kv_spec import SlidingWindowSpec
from pagemill.utils.math import ceil_div


class SlidingWindowManager(GroupManager):
    """A prefix is cached when the window before its end is; what lies before the window need not be."""

    prefix_closed = False

    def __init__(self, pool: BlockPool, spec: SlidingWindowSpec, group_index: int, hash_block_size: int) -> None:
        super().__init__(pool, spec, group_index, hash_block_size)
        self._window = spec.window

    def cached_prefix(self, hashes: Sequence[bytes], num_blocks: int) -> list[int]:
        """Right to left, up to the first run of cached blocks that covers the window, or reaches the beginning."""
        needed = ceil_div(self._window - 1, self.block_size)
        run: list[int] = []
        for index in range(num_blocks - 1, -1, -1):
            if len(run) == needed:
                return [NULL_BLOCK] * (index + 1) + run[::-1]
            block = self._find(hashes, index)
            if block is None:
                run.clear()
            else:
                run.append(block)
        return run[::-1]

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The window and one step's tokens; each may begin anywhere in a block."""
        return peak_blocks(self._spec, num_tokens, step_tokens)

    def drop_out_of_window(self, request_id: str, num_computed: int) -> None:
        """Free the blocks that end before the window of the token at position `num_computed` begins."""
        table = self._tables[request_id]
        start, end = table.num_dropped, (num_computed - self._window + 1) // self.block_size
        if end <= start:
            return
        self._pool.free(table.block_ids[start:end])
        table.block_ids[start:end] = [NULL_BLOCK] * (end - start)
        table.num_dropped = end
