"""`ChunkedLocalManager`: only the tokens of the current chunk are kept.

Knows nothing about other groups of the same request.
"""

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.managers.recent import RecentBlocksManager
from pagemill.messages.kv_spec import ChunkedLocalSpec


class ChunkedLocalManager(RecentBlocksManager):
    """A cached prefix needs the chunk that the next token is in, as far as it is known: nothing, at the end of a
    chunk."""

    def __init__(self, pool: BlockPool, spec: ChunkedLocalSpec, group_index: int, hash_block_size: int) -> None:
        super().__init__(pool, spec, group_index, hash_block_size)
        self._chunk_size = spec.chunk_size

    def first_read(self, position: int) -> int:
        """The block in which the chunk begins."""
        return position // self._chunk_size * self._chunk_size // self.block_size
