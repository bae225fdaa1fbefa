"""Cached prefixes of full attention."""

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.managers.full import FullAttentionManager
from tests.fakes.engine_setup import full

HASHES = [b"%d" % index for index in range(15)]


def test_the_scan_ends_at_the_first_block_that_is_not_cached():
    """Tokens 0 to 6 of the worked example, although later blocks are cached too."""
    pool = BlockPool(32)
    manager = FullAttentionManager(pool, full(1), 0, 1)
    pool.allocate(15)
    for index in [0, 1, 2, 3, 4, 5, 6, 9, 10]:
        pool.commit(index + 1, HASHES[index] + b"\0\0")
    assert manager.cached_prefix(HASHES, 14) == [1, 2, 3, 4, 5, 6, 7]
    assert manager.cached_prefix(HASHES, 3) == [1, 2, 3]


def test_large_blocks_go_by_the_last_hash_within_them():
    pool = BlockPool(8)
    manager = FullAttentionManager(pool, full(8), 1, 4)
    manager.adopt("r", [], 0)
    manager.allocate("r", 16)
    manager.commit("r", HASHES, 15)
    assert pool.cached_blocks() == {1: b"1\0\1"}
    manager.commit("r", HASHES, 16)
    assert pool.cached_blocks() == {1: b"1\0\1", 2: b"3\0\1"}
    assert manager.cached_prefix(HASHES, 2) == [1, 2]


def test_tables_hold_every_token_and_are_appended_to():
    pool = BlockPool(8)
    manager = FullAttentionManager(pool, full(4), 0, 4)
    assert manager.num_missing("r", 9) == 3
    manager.adopt("r", [], 0)
    assert manager.allocate("r", 9) == [1, 2, 3]
    assert manager.allocate("r", 12) == []
    assert manager.allocate("r", 13) == [4]
    manager.drop_out_of_window("r", 13)
    assert manager.table("r").block_ids == [1, 2, 3, 4]
    assert manager.peak_blocks(17, 4) == 5
