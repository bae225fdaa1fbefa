"""`SlidingWindowManager`: only the last `window` tokens are kept, the current one included.

Knows nothing about other groups of the same request.
"""

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.managers.recent import RecentBlocksManager
from pagemill.messages.kv_spec import SlidingWindowSpec


class SlidingWindowManager(RecentBlocksManager):
    """A cached prefix needs the window before its end."""

    def __init__(self, pool: BlockPool, spec: SlidingWindowSpec, group_index: int, hash_block_size: int) -> None:
        super().__init__(pool, spec, group_index, hash_block_size)
        self._window = spec.window

    def first_read(self, position: int) -> int:
        """The block of the oldest token in the window."""
        return max(0, position - self._window + 1) // self.block_size
