"""Groups agree on one prefix."""

from dataclasses import dataclass

import pytest

from pagemill.engine.kv_cache.block_pool import BlockPool, IntegrityError
from pagemill.engine.kv_cache.coordinator import KVCacheCoordinator
from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from tests.fakes.engine_setup import chunked, full, mamba, sliding

HASHES = [b"%02d" % index for index in range(20)]


def with_cached(*groups):
    """(spec, cached block indices) per group; blocks of one token."""
    pool = BlockPool(20 * len(groups) + 1)
    config = KVCacheConfig(pool.num_blocks, tuple(KVCacheGroup((), spec) for spec, _ in groups))
    coordinator = KVCacheCoordinator(pool, config)
    for group, (_, cached) in enumerate(groups):
        blocks = pool.allocate(20)
        for index in cached:
            pool.commit(blocks[index], HASHES[index] + group.to_bytes(2, "big"))
    return coordinator


def test_full_attention_bounds_the_sliding_window():
    coordinator = with_cached((sliding(4, 1), [2, 3, 4, 5, 11, 12, 13]), (full(1), range(7)))
    length, tables = coordinator.cached_prefix(HASHES, 14)
    assert length == 6
    assert tables[0] == [0, 0, 0, 4, 5, 6]
    assert tables[1] == [21, 22, 23, 24, 25, 26]


def test_three_kinds_shorten_each_other_until_nothing_changes():
    """The wide window allows 12, 9 and 4; the narrow one 11, 9 and 8; full attention up to 12."""
    wide = [1, 2, 3, 6, 7, 8, 9, 10, 11]
    wide.remove(9)
    coordinator = with_cached((full(1), range(12)), (sliding(4, 1), wide), (sliding(2, 1), [10, 8, 7]))
    length, tables = coordinator.cached_prefix(HASHES, 14)
    assert length == 9
    assert [len(table) for table in tables] == [9, 9, 9]


def test_a_state_is_a_prefix_within_what_full_attention_has():
    coordinator = with_cached((full(1), range(12)), (mamba(block_size=1), [3, 7, 13]))
    length, tables = coordinator.cached_prefix(HASHES, 14)
    assert length == 8
    assert tables == ([1, 2, 3, 4, 5, 6, 7, 8], [0] * 7 + [28])


def test_five_kinds_agree():
    """States after 7, 9 and 11 tokens; chunks of 4 have gaps at 5 and 8; windows allow 4 and 7, or 9 to 11."""
    coordinator = with_cached(
        (mamba(block_size=1), [6, 8, 10]),
        (chunked(4, 1), [4, 6, 9, 10]),
        (sliding(3, 1), [2, 3, 5, 6, 7, 8, 9, 10]),
        (sliding(2, 1), [3, 6, 10]),
        (full(1), range(11)),
    )
    assert coordinator.cached_prefix(HASHES, 14)[0] == 0
    coordinator = with_cached(
        (mamba(block_size=1), [6, 8, 10]),
        (chunked(4, 1), [4, 5, 6, 9, 10]),
        (sliding(3, 1), [2, 3, 5, 6, 7, 8, 9, 10]),
        (sliding(2, 1), [3, 6, 10]),
        (full(1), range(11)),
    )
    length, tables = coordinator.cached_prefix(HASHES, 14)
    assert length == 7
    assert [[index for index, block in enumerate(table) if block] for table in tables] == [
        [6], [4, 5, 6], [5, 6], [6], [0, 1, 2, 3, 4, 5, 6],
    ]  # fmt: skip


def test_no_common_prefix_is_a_prefix_of_nothing():
    coordinator = with_cached((full(1), range(12)), (sliding(4, 1), []))
    assert coordinator.cached_prefix(HASHES, 14) == (0, ([], []))
    assert coordinator.cached_prefix(HASHES, 0) == (0, ([], []))


def test_models_without_full_attention_agree_too():
    coordinator = with_cached((sliding(3, 1), [3, 4, 8, 9]), (sliding(2, 1), [4, 8]))
    assert coordinator.cached_prefix(HASHES, 14)[0] == 5


def test_integrity_counts_tables_against_the_pool():
    coordinator = with_cached((full(1), []))
    with pytest.raises(IntegrityError, match="tables hold blocks"):
        coordinator.check_integrity()


def test_a_spec_without_manager_is_refused():
    @dataclass(frozen=True)
    class OddSpec(FullAttentionSpec):
        pass

    config = KVCacheConfig(4, (KVCacheGroup((), OddSpec(4, 1, 1, "float32")),))
    with pytest.raises(ConfigError, match="no KV cache manager for OddSpec"):
        KVCacheCoordinator(BlockPool(4), config)
