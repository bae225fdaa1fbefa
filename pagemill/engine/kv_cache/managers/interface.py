"""`GroupManager`: the blocks of one KV group, per request. Knows nothing about other groups, budgets or order."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pagemill.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from pagemill.engine.kv_cache.prefix_hash import GROUP_BYTES
from pagemill.messages.kv_spec import KVCacheSpec
from pagemill.utils.math import ceil_div


class BlockTable:
    """The blocks of one request, in order of position; NULL_BLOCK where they were out of window."""

    __slots__ = ("block_ids", "num_committed", "num_dropped")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.num_committed = 0
        """Leading blocks that can be found by their hash, or were."""
        self.num_dropped = 0
        """Leading entries that are NULL_BLOCK."""

    @property
    def num_held(self) -> int:
        """Entries that are blocks."""
        return len(self.block_ids) - self.num_dropped


class GroupManager(ABC):
    """Tables are append-only for whoever got them: a dropped entry is simply never read again.

    Hashes are given for blocks of `hash_block_size` tokens, which divides this group's block size. Because a hash
    commits to all tokens before it, this group's i-th block goes by the last hash within it.
    """

    prefix_closed: bool
    """Whether every shorter prefix of a cached prefix is a cached prefix too."""
    drops: bool = False
    """Whether `drop_out_of_window` may do something."""

    def __init__(self, pool: BlockPool, spec: KVCacheSpec, group_index: int, hash_block_size: int) -> None:
        self.block_size = spec.block_size
        self._pool = pool
        self._spec = spec
        self._stride = spec.block_size // hash_block_size
        # Equal tokens in different groups are different memory, cached and evicted independently.
        self._suffix = group_index.to_bytes(GROUP_BYTES, "big")
        self._tables: dict[str, BlockTable] = {}

    @abstractmethod
    def cached_prefix(self, hashes: Sequence[bytes], num_blocks: int) -> list[int]:
        """The table of the longest cached prefix of at most `num_blocks` blocks of this group."""

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks that a request holds until `num_tokens` are computed, at most `step_tokens` in a step."""
        return self._spec.peak_blocks(num_tokens, step_tokens)

    def begin_step(self) -> None:
        """A step is going to be scheduled; those before it will be executed before it."""
        return

    def drop_out_of_window(self, request_id: str, num_computed: int) -> None:
        """Free blocks that no token at position `num_computed` or later will read."""
        return

    def table(self, request_id: str) -> BlockTable:
        """The request's table; empty for one that holds nothing."""
        return self._tables.get(request_id) or BlockTable()

    def tables(self) -> dict[str, BlockTable]:
        """All tables, by request id."""
        return self._tables

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Blocks to be allocated before the request can hold `num_tokens` tokens."""
        table = self._tables.get(request_id)
        missing = ceil_div(num_tokens, self.block_size) - (len(table.block_ids) if table else 0)
        return missing if missing > 0 else 0

    def adopt(self, request_id: str, prefix: Sequence[int], num_tokens: int) -> None:
        """Begin a request's table with `prefix`, a result of `cached_prefix` whose blocks were touched; the first
        `num_tokens` tokens of the request are in it."""
        table = BlockTable()
        table.block_ids.extend(prefix)
        table.num_committed = num_tokens // self.block_size
        while table.num_dropped < len(prefix) and prefix[table.num_dropped] == NULL_BLOCK:
            table.num_dropped += 1
        self._tables[request_id] = table

    def allocate(self, request_id: str, num_tokens: int) -> list[int]:
        """Append blocks until the table holds `num_tokens` tokens; the new ones."""
        table = self._tables[request_id]
        new = self._pool.allocate(max(0, ceil_div(num_tokens, self.block_size) - len(table.block_ids)))
        table.block_ids += new
        return new

    def commit(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Let the full blocks among the first `num_tokens` tokens be found by their hashes."""
        table = self._tables[request_id]
        stride = self._stride
        for index in range(table.num_committed, num_tokens // self.block_size):
            block = table.block_ids[index]
            if block != NULL_BLOCK:
                self._pool.commit(block, hashes[(index + 1) * stride - 1] + self._suffix)
            table.num_committed = index + 1

    def free(self, request_id: str) -> None:
        """Let go of all blocks of a request."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._pool.free(table.block_ids)

    def _find(self, hashes: Sequence[bytes], index: int) -> int | None:
        """The block that caches this group's block `index` of a request with these hashes."""
        return self._pool.find(hashes[(index + 1) * self._stride - 1] + self._suffix)
