"""States at block boundaries: which are kept, which can be found, and when."""

import pytest

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.managers.mamba import MambaManager
from tests.fakes.engine_setup import mamba

HASHES = [b"%d" % index for index in range(15)]


def new_manager(block_size=4):
    pool = BlockPool(32)
    return MambaManager(pool, mamba(block_size=block_size), 0, block_size), pool


def test_the_latest_cached_boundary_is_the_prefix():
    """From right to left; what lies before a state need not be cached."""
    manager, pool = new_manager()
    blocks = pool.allocate(15)
    for index in (1, 4):
        pool.commit(blocks[index], HASHES[index] + b"\0\0")
    assert manager.cached_prefix(HASHES, 12) == [0, 0, 0, 0, blocks[4]]
    assert manager.cached_prefix(HASHES, 4) == [0, blocks[1]]
    assert manager.cached_prefix(HASHES, 1) == []


def test_a_state_is_kept_until_the_next_one_is_reached():
    manager, pool = new_manager()
    manager.adopt("r", [], 0)
    assert manager.allocate("r", 10) == [1, 2, 3]
    manager.drop_out_of_window("r", 8)  # token 8 reads the state after token 7
    assert manager.table("r").block_ids == [0, 2, 3]
    manager.drop_out_of_window("r", 9)
    assert manager.table("r").block_ids == [0, 0, 3]
    manager.free("r")
    assert pool.num_used == 0
    pool.check_integrity()


def test_a_request_without_boundaries_holds_one_state_however_long_it_gets():
    manager, pool = new_manager(block_size=1024)
    manager.adopt("r", [], 0)
    assert manager.allocate("r", 7) == [1]
    for computed in (7, 8, 500, 1023):
        manager.drop_out_of_window("r", computed)
        assert manager.allocate("r", computed + 1) == []
    assert pool.num_used == manager.peak_blocks(1024, 64) == 1


def test_a_state_can_be_found_once_the_step_that_computes_it_is_over():
    """A step reads all states before it writes one, so whoever is admitted in the same step would read too early."""
    manager, _ = new_manager()
    manager.begin_step()
    manager.adopt("r", [], 0)
    manager.allocate("r", 9)
    manager.commit("r", HASHES, 9)
    assert manager.cached_prefix(HASHES, 3) == []
    manager.begin_step()
    assert manager.cached_prefix(HASHES, 3) == [0, 2]


def test_a_cached_state_is_shared_and_continued_elsewhere():
    manager, pool = new_manager()
    manager.adopt("first", [], 0)
    manager.allocate("first", 8)
    manager.commit("first", HASHES, 8)
    manager.begin_step()
    prefix = manager.cached_prefix(HASHES, 3)
    pool.touch(prefix)
    manager.adopt("second", prefix, 8)
    assert prefix == [0, 2]
    assert manager.allocate("second", 9) == manager.table("second").block_ids[2:] == [3]
    assert manager.allocate("first", 9) == [4]
    assert pool.ref_count(2) == 2


@pytest.mark.parametrize("step", [1, 3, 4, 9])
def test_the_peak_is_reached_and_never_exceeded(step):
    manager, _ = new_manager()
    held = [-(-(start + step) // 4) - manager.first_read(start) for start in range(1, 100)]
    assert manager.peak_blocks(1000, step) == max(held)
    assert manager.peak_blocks(3, step) == 1
