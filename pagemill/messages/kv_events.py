"""What happened to the prefix cache, as subscribers outside this deployment read it: routers, indexers, dashboards.

Knows nothing about how it travels. The layout is a public format that existing subscribers decode by position: arrays
that begin with the name of the event. Fields are only ever added at the end.
"""

from collections.abc import Sequence

import msgspec

MEDIUM_DEVICE = "GPU"
"""The memory that attention reads, whatever the device is. Subscribers take this word for the first tier of a cache
and "CPU" for copies that must be loaded back before they are of use."""

ExtraKey = str | tuple[str, int]
"""A cache salt or the name of an adapter; or a multimodal item: hash, and where it begins, in tokens from the
beginning of the block (negative for one that began before it)."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive blocks can be found from now on."""

    block_hashes: list[int]
    """Unsigned 64-bit numbers: the last eight bytes of each block's hash, big-endian."""
    parent_block_hash: int | None
    """The block before the first; None where the first is the beginning of a prompt."""
    token_ids: list[int]
    """Of all the blocks: len(block_hashes) * block_size."""
    block_size: int
    """Tokens per block of this group."""
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None
    """Per block, what besides its tokens went into its hash; None where no block has any."""
    group_idx: int | None = None
    """The KV group: the same tokens are cached, and removed, once per group."""
    kv_cache_spec_kind: str | None = None
    """What the layers of the group keep: full_attention, sliding_window, chunked_local_attention or mamba."""
    kv_cache_spec_sliding_window: int | None = None
    """Tokens, where it is a window."""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks can no longer be found."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No block can be found any more, of any group."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one step, abort or reset did, in order."""

    ts: float
    """Seconds since 1970."""
    events: Sequence[KVEvent]
    data_parallel_rank: int | None = None
