"""`PoolObserver`: what a `BlockPool` reports to. Knows nothing about what is made of it."""

from collections.abc import Sequence


class PoolObserver:
    """Told what happens to the blocks of a pool; must not change the pool. A method that is not overridden costs
    nothing. The null block (`block_pool.NULL_BLOCK`) may be among `blocks` of all but `taken`."""

    def taken(self, blocks: Sequence[int]) -> None:
        """Blocks were allocated: what they hold will be overwritten."""

    def used(self, blocks: Sequence[int]) -> None:
        """Cached blocks were found, and another request holds them too from now on."""

    def released(self, blocks: Sequence[int]) -> None:
        """A request let go of blocks, which others may hold still."""

    def spoiled(self, blocks: Sequence[int]) -> None:
        """What blocks hold is wrong and must not be used again; they stay with whoever holds them."""

    def stored(self, key: bytes, block: int) -> None:
        """A block can be found by `key`; none could before."""

    def removed(self, key: bytes, block: int) -> None:
        """No block can be found by `key` any more; the last one was `block`."""

    def cleared(self) -> None:
        """No block can be found by any key any more."""
