"""`KVCacheManager`: the scheduler's whole view of the KV cache. Knows nothing about budgets or order."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.config.choices import HashAlgorithm
from pagemill.engine.kv_cache.block_heads import BlockHeads
from pagemill.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from pagemill.engine.kv_cache.coordinator import BlockIds, KVCacheCoordinator
from pagemill.engine.kv_cache.events import NO_EVENTS, EventRecorder
from pagemill.engine.kv_cache.partial_reuse import PartialReuse
from pagemill.engine.kv_cache.pool_observer import PoolObserver
from pagemill.engine.kv_cache.prefix_hash import PrefixHasher
from pagemill.engine.kv_cache.residency import ResidencySampler
from pagemill.engine.request import Request
from pagemill.messages.block_copies import BlockCopy
from pagemill.messages.kv_events import KVEvent
from pagemill.messages.kv_spec import KVCacheConfig
from pagemill.messages.stats import ResidencySamples


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Leading tokens of a request that are in the cache already. Valid until the next call that allocates."""

    num_tokens: int
    block_ids: BlockIds
    """The full blocks."""
    sources: tuple[int, ...] = ()
    """Where tokens are found behind the full blocks: the block of each group from which they are to be copied."""

    def copies(self, block_ids: BlockIds) -> list[BlockCopy]:
        """What is to be copied for a request with these tables, which begin with the full blocks."""
        if not self.sources:
            return []
        targets = [table[len(full)] for table, full in zip(block_ids, self.block_ids, strict=True)]
        # A free source may have been taken for this very purpose: then its contents are where they belong.
        return [BlockCopy(*pair) for pair in zip(self.sources, targets, strict=True) if pair[0] != pair[1]]


class KVCacheManager:
    """Blocks of all requests. `None` only ever means "does not fit".

    Without `hash_algorithm`, prefixes are not shared. `seed` pins the hashes (prefix_hash.py). With `partial_reuse`,
    parts of blocks are shared too, by copying (partial_reuse.py). With `record_events`, `take_events` says what became
    findable and what no longer is; with `residency`, `take_residency` says how long blocks stay.
    `observers` are told what happens to blocks, after all that is built here.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        hash_algorithm: HashAlgorithm | None,
        seed: str | None = None,
        *,
        partial_reuse: bool = False,
        record_events: bool = False,
        residency: ResidencySampler | None = None,
        observers: Sequence[PoolObserver] = (),
    ) -> None:
        self._events = EventRecorder(config) if record_events else NO_EVENTS
        self._residency = residency
        heads = BlockHeads(config.num_blocks) if partial_reuse and hash_algorithm is not None else None
        known = (self._events, heads, residency, *observers)
        self.pool = BlockPool(config.num_blocks, [observer for observer in known if observer is not None])
        self.coordinator = KVCacheCoordinator(self.pool, config)
        self.managers = self.coordinator.managers
        self._dropping = [manager for manager in self.managers if manager.drops]
        self.granularity = self.coordinator.hash_block_size
        """Tokens of the smallest block, in which full blocks are counted."""
        self._alike = all(manager.block_size == self.granularity for manager in self.managers)
        self._hasher = None if hash_algorithm is None else PrefixHasher(hash_algorithm, self.granularity, seed)
        self._nothing = CachedPrefix(0, tuple([] for _ in self.managers))
        self._copies: dict[str, list[BlockCopy]] = {}
        """Request -> what is to be copied before the step in which it begins."""
        self._partial: PartialReuse | None = None
        if heads is not None and self._hasher is not None:
            self._partial = PartialReuse(config, heads, self.managers, self._hasher)

    def begin_step(self) -> None:
        """A step is going to be scheduled: what the steps before it compute will be there when it runs."""
        self.coordinator.begin_step()
        if self._partial is not None:
            self._partial.begin_step()

    def cached_prefix(self, request: Request) -> CachedPrefix:
        """The longest cached prefix, within `Request.max_cached_tokens`. None at all for a request that reads what all
        tokens become, which is nowhere kept."""
        if self._hasher is None or request.reads_all_tokens:
            return self._nothing
        self._hasher.extend(request)
        num_tokens, block_ids = self.coordinator.cached_prefix(request.block_hashes, request.max_cached_tokens)
        if self._partial is None:
            return CachedPrefix(num_tokens, block_ids)
        num_copied, sources = self._partial.extend(request, num_tokens)
        return CachedPrefix(num_tokens + num_copied, block_ids, sources)

    def blocks_to_finish(self, request: Request, prefix: CachedPrefix, step_tokens: int) -> int:
        """Free blocks that a waiting request takes until all its tokens are computed, at most `step_tokens` in a
        step. Cached blocks that are free leave the free list too; those that others hold cost nothing, unless they
        will leave the window and make room for others."""
        shared = 0
        for manager, block_ids in zip(self.managers, prefix.block_ids, strict=True):
            if manager.prefix_closed:
                shared += self.pool.count_held(block_ids)
        return self.coordinator.peak_blocks(request.num_tokens, step_tokens) - shared

    def blocks_left(self, request: Request, num_tokens: int, step_tokens: int) -> int:
        """Free blocks that a running request may still take until its `num_tokens` tokens are computed."""
        peak = self.coordinator.peak_blocks(num_tokens, step_tokens)
        return max(0, peak - self.coordinator.num_held(request.request_id))

    def begin(self, request: Request, prefix: CachedPrefix, num_tokens: int) -> BlockIds | None:
        """Blocks of a waiting request for its first `num_tokens` tokens, `prefix` included."""
        missing = sum(
            manager.num_missing(request.request_id, num_tokens) - len(block_ids)
            for manager, block_ids in zip(self.managers, prefix.block_ids, strict=True)
        )
        revived = sum(
            len(block_ids) - block_ids.count(NULL_BLOCK) - self.pool.count_held(block_ids)
            for block_ids in prefix.block_ids
        )
        if missing + revived > self.pool.num_free:
            return None
        for block_ids in prefix.block_ids:
            self.pool.touch(block_ids)
        for manager, block_ids in zip(self.managers, prefix.block_ids, strict=True):
            manager.adopt(request.request_id, block_ids, prefix.num_tokens)
            manager.allocate(request.request_id, num_tokens)
        tables = tuple(list(manager.table(request.request_id).block_ids) for manager in self.managers)
        if prefix.sources:
            self._copies[request.request_id] = prefix.copies(tables)
        return tables

    def take_copies(self) -> list[BlockCopy]:
        """What must be copied before the next step computes anything, for requests that began since the last call."""
        if not self._copies:
            return []
        copies = [copy for wanted in self._copies.values() for copy in wanted]
        self._copies.clear()
        return copies

    def grow(self, request: Request, num_computed: int, num_tokens: int) -> BlockIds | None:
        """New blocks of a running request, so that `num_tokens` tokens fit; `num_computed` of them are computed."""
        request_id = request.request_id
        self.drop_out_of_window(request, num_computed)
        if self.coordinator.num_missing(request_id, num_tokens) > self.pool.num_free:
            return None
        return tuple([manager.allocate(request_id, num_tokens) for manager in self.managers])

    def drop_out_of_window(self, request: Request, num_computed: int) -> None:
        """Free what no token at position `num_computed` or later will read."""
        for manager in self._dropping:
            manager.drop_out_of_window(request.request_id, num_computed)

    def commit(self, request: Request, num_tokens: int) -> None:
        """Share the full blocks among the first `num_tokens` tokens, which are computed by the end of this step."""
        if self._hasher is None:
            return
        self._hasher.extend(request)
        if self._partial is not None:
            self._partial.commit(request, num_tokens)
        for manager in self.managers:
            self._events.begin(request, manager.table(request.request_id).num_committed)
            manager.commit(request.request_id, request.block_hashes, num_tokens)

    def capacity(self, num_tokens: int) -> int:
        """Tokens that the blocks of a request of `num_tokens` tokens hold, in the group that holds the fewest."""
        size = self.granularity
        if self._alike:
            return -(-num_tokens // size) * size
        return min(-(-num_tokens // manager.block_size) * manager.block_size for manager in self.managers)

    def free(self, request: Request, num_computed: int = 0) -> None:
        """Let go of all blocks of a request. The first `num_computed` tokens are in them by the end of the steps in
        flight; what of them is not shared yet, such as those in the last block, can be copied from now on."""
        if self._partial is not None:
            self._copies.pop(request.request_id, None)
            if num_computed:
                self.commit(request, min(num_computed, request.num_tokens))
        for manager in self.managers:
            manager.free(request.request_id)

    def discredit(self, request: Request) -> None:
        """Let nobody find the blocks that a running request holds: what is in them made no sense."""
        for manager in self.managers:
            self.pool.forget(manager.table(request.request_id).block_ids)

    def reset(self) -> bool:
        """Empty the prefix cache. False, and nothing happens, while any request holds blocks: those would be shared
        again although they were computed before."""
        if self.pool.num_used:
            return False
        self.pool.forget_all()
        return True

    def take_events(self) -> Sequence[KVEvent]:
        """What became findable by prefix, and what no longer is, since the last call; nothing unless recorded."""
        return self._events.take()

    def take_residency(self) -> ResidencySamples | None:
        """What was sampled of the blocks' residency since the last call; None when nothing was."""
        return None if self._residency is None else self._residency.take()

    def usage(self) -> float:
        """Blocks held / all blocks, 0 to 1."""
        return self.pool.num_used / (self.pool.num_blocks - 1)

    def check_integrity(self) -> None:
        """Raise IntegrityError when the bookkeeping contradicts itself."""
        self.coordinator.check_integrity()
        if self._partial is not None:
            self._partial.check_integrity()
