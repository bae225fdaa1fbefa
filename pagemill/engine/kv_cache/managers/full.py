"""`FullAttentionManager`: every token is kept until the request ends. Knows nothing about windows."""

from collections.abc import Sequence

from pagemill.engine.kv_cache.managers.interface import GroupManager


class FullAttentionManager(GroupManager):
    """A prefix is cached when all its blocks are."""

    prefix_closed = True

    def cached_prefix(self, hashes: Sequence[bytes], num_blocks: int) -> list[int]:
        """Left to right, up to the first block that is not cached."""
        find = self._pool.find
        stride = self._stride
        suffix = self._suffix
        found: list[int] = []
        for last in range(stride - 1, num_blocks * stride, stride):
            block = find(hashes[last] + suffix)
            if block is None:
                break
            found.append(block)
        return found
