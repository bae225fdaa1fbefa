"""Cached prefixes of a window, and blocks that leave it."""

import pytest

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.managers.sliding_window import SlidingWindowManager
from tests.fakes.engine_setup import sliding

HASHES = [b"%d" % index for index in range(15)]


def with_cached(blocks, window=4, block_size=1):
    """A manager that has these blocks (by index) of a prompt cached; pool block id = index + 1."""
    pool = BlockPool(32)
    manager = SlidingWindowManager(pool, sliding(window, block_size), 0, block_size)
    pool.allocate(15)
    for index in blocks:
        pool.commit(index + 1, HASHES[index] + b"\0\0")
    return manager, pool


def test_the_three_hit_lengths_of_the_worked_example():
    """Window 4, blocks of 1, a prompt of 15: hits of 14, 6 and 5, from right to left."""
    manager, _ = with_cached([2, 3, 4, 5, 11, 12, 13])
    assert manager.cached_prefix(HASHES, 14) == [0] * 11 + [12, 13, 14]
    assert manager.cached_prefix(HASHES, 13) == [0] * 3 + [4, 5, 6]
    assert manager.cached_prefix(HASHES, 5) == [0] * 2 + [3, 4, 5]
    assert manager.cached_prefix(HASHES, 4) == []


def test_a_prefix_shorter_than_the_window_must_begin_at_the_beginning():
    manager, _ = with_cached([0, 1, 5, 6])
    assert manager.cached_prefix(HASHES, 8) == [1, 2]
    manager, _ = with_cached([1, 2])
    assert manager.cached_prefix(HASHES, 8) == []


@pytest.mark.parametrize(("window", "block_size", "needed"), [(1, 4, 0), (4, 4, 1), (5, 4, 1), (6, 4, 2), (9, 4, 2)])
def test_the_window_before_the_next_token_decides_how_many_blocks_are_needed(window, block_size, needed):
    manager, _ = with_cached(range(10), window, block_size)
    table = manager.cached_prefix(HASHES, 10)
    assert len(table) == 10
    assert sum(1 for block in table if block) == needed


def test_blocks_are_dropped_as_soon_as_no_later_token_reads_them():
    pool = BlockPool(16)
    manager = SlidingWindowManager(pool, sliding(5), 0, 4)
    manager.adopt("r", [], 0)
    assert manager.allocate("r", 16) == [1, 2, 3, 4]
    manager.drop_out_of_window("r", 7)  # position 7 reads 3 to 7
    assert manager.table("r").block_ids == [1, 2, 3, 4]
    manager.drop_out_of_window("r", 8)  # position 8 reads 4 to 8
    assert manager.table("r").block_ids == [0, 2, 3, 4]
    manager.drop_out_of_window("r", 16)
    assert manager.table("r").block_ids == [0, 0, 0, 4]
    assert manager.table("r").num_held == 1
    assert pool.free_blocks()[-3:] == [1, 3, 2]
    manager.free("r")
    assert pool.num_used == 0
    pool.check_integrity()


def test_the_peak_is_the_window_and_a_step():
    manager = SlidingWindowManager(BlockPool(16), sliding(9), 0, 4)
    assert manager.peak_blocks(1000, 1) == 4
    assert manager.peak_blocks(1000, 16) == 7
    assert manager.peak_blocks(10, 16) == 3
