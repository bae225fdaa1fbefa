"""`PartialReuse`: a cached prefix goes on for a part of the next block, which is copied.

Knows nothing about budgets, order, or how a block is copied.
"""

from collections.abc import Sequence

from pagemill.engine.kv_cache.block_heads import BlockHeads
from pagemill.engine.kv_cache.block_pool import NULL_BLOCK
from pagemill.engine.kv_cache.managers.interface import GroupManager
from pagemill.engine.kv_cache.prefix_hash import PrefixHasher
from pagemill.engine.request import Request
from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import FullAttentionSpec, KVCacheConfig
from pagemill.utils.math import ceil_div


class PartialReuse:
    """Follows which computed blocks begin how, in every group.

    A block is a source from the step after the one that computes it until it is taken for something else, whether it
    is full or the partly filled last one of a request, held by somebody or free. Two blocks are compared only when
    all tokens before them are equal, and whatever else makes contents unique (`PrefixHasher.past`). The source need
    not be held: a step copies before it computes, so what overwrites the source comes later.

    Where groups have blocks of different sizes, no more is copied than the beginning of the smallest one.
    """

    def __init__(
        self, config: KVCacheConfig, heads: BlockHeads, managers: Sequence[GroupManager], hasher: PrefixHasher
    ) -> None:
        """`heads` observes the managers' pool. Raises ConfigError for a group that keeps states instead of tokens."""
        for group in config.groups:
            if not isinstance(group.spec, FullAttentionSpec):
                raise ConfigError(
                    f"enable_partial_block_reuse=True: layer {group.layers[0]!r} keeps a state per block "
                    f"({type(group.spec).__name__}), of which no part can be reused; leave the setting out"
                )
        self._heads = heads
        self._hasher = hasher
        self._groups = [(index.to_bytes(2, "big"), manager) for index, manager in enumerate(managers)]

    def begin_step(self) -> None:
        """A step is going to be scheduled: it may copy what those before it compute."""
        self._heads.begin_step()

    def extend(self, request: Request, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """How many tokens after the first `num_tokens`, which fill whole blocks of every group, can be copied, and
        from which block of each group. No more than `Request.max_cached_tokens`; (0, ()) when none can."""
        size = self._hasher.block_size
        most = min(size - 1, request.max_cached_tokens - num_tokens)
        if most <= 0:
            return 0, ()
        tokens = request.token_ids[num_tokens : num_tokens + most].tobytes()
        past = self._hasher.past(request, num_tokens // size)
        sources = []
        for prefix, _ in self._groups:
            source, most = self._heads.longest(prefix + past, tokens)
            if not most:
                return 0, ()
            sources.append(source)
            tokens = tokens[: most * request.token_ids.itemsize]
        return most, tuple(sources)

    def commit(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed by the end of this step. Called before the managers commit, and
        after the request's full blocks are hashed."""
        size = self._hasher.block_size
        tokens = request.token_ids
        for prefix, manager in self._groups:
            table = manager.table(request.request_id)
            for index in range(table.num_committed, ceil_div(num_tokens, manager.block_size)):
                block = table.block_ids[index]
                start = index * manager.block_size
                if block != NULL_BLOCK:
                    past = self._hasher.past(request, start // size)
                    self._heads.add(block, prefix + past, tokens[start : min(start + size, num_tokens)].tobytes())

    def check_integrity(self) -> None:
        """Raise IntegrityError when the index contradicts itself."""
        self._heads.check_integrity()
