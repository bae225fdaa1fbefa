"""`MambaManager`: a state per block of tokens, of which only the latest is read. See `MambaSpec` for what it means.

Knows nothing about what a state is, or about other groups of the same request.
"""

from collections.abc import Sequence

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.managers.recent import RecentBlocksManager
from pagemill.messages.kv_spec import MambaSpec


class MambaManager(RecentBlocksManager):
    """A cached prefix needs the state at its end, and ends at a block boundary. The next token's state is written to
    another block, so that the cached one may be read by any number of requests and is never copied."""

    def __init__(self, pool: BlockPool, spec: MambaSpec, group_index: int, hash_block_size: int) -> None:
        super().__init__(pool, spec, group_index, hash_block_size)
        self._committed_now: set[int] = set()

    def begin_step(self) -> None:
        """From now on, states of the steps before are there to be read."""
        self._committed_now.clear()

    def first_read(self, position: int) -> int:
        """The block with the state after the token before."""
        return max(0, position - 1) // self.block_size

    def commit(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Let states be found by their hashes, from the next step on: a step reads states before it writes any."""
        table = self._tables[request_id]
        start = table.num_committed
        super().commit(request_id, hashes, num_tokens)
        self._committed_now.update(table.block_ids[start : table.num_committed])

    def _find(self, hashes: Sequence[bytes], index: int) -> int | None:
        block = super()._find(hashes, index)
        return None if block in self._committed_now else block
