"""Cached prefixes within chunks, and chunks that are over."""

import pytest

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.managers.chunked_local import ChunkedLocalManager
from tests.fakes.engine_setup import chunked

HASHES = [b"%d" % index for index in range(15)]


def with_cached(blocks, chunk_size, block_size=1):
    """A manager that has these blocks (by index) of a prompt cached; pool block id = index + 1."""
    pool = BlockPool(32)
    manager = ChunkedLocalManager(pool, chunked(chunk_size, block_size), 0, block_size)
    pool.allocate(15)
    for index in blocks:
        pool.commit(index + 1, HASHES[index] + b"\0\0")
    return manager


def test_a_prefix_needs_the_chunk_of_the_next_token():
    """Chunks of 4, blocks of 1: token 11 reads 8, 9 and 10."""
    manager = with_cached([8, 9, 10], chunk_size=4)
    assert manager.cached_prefix(HASHES, 11) == [0] * 8 + [9, 10, 11]
    assert manager.cached_prefix(HASHES, 10) == [0] * 8 + [9, 10]


def test_a_prefix_that_ends_with_a_chunk_needs_nothing():
    manager = with_cached([], chunk_size=4)
    assert manager.cached_prefix(HASHES, 12) == [0] * 12
    assert manager.cached_prefix(HASHES, 15) == [0] * 12
    assert manager.cached_prefix(HASHES, 3) == []


def test_a_gap_in_the_chunk_ends_the_prefix_before_it():
    manager = with_cached([8, 10], chunk_size=4)
    assert manager.cached_prefix(HASHES, 11) == [0] * 8 + [9]


def test_chunks_that_begin_within_a_block():
    """Chunks of 6, blocks of 4: the chunk of token 8 begins at 6, in block 1; that of token 12 at 12."""
    manager = with_cached([1], chunk_size=6, block_size=4)
    assert manager.cached_prefix(HASHES, 2) == [0, 2]
    assert manager.cached_prefix(HASHES, 3) == [0, 0, 0]
    assert with_cached([0], chunk_size=6, block_size=4).cached_prefix(HASHES, 2) == [1]


@pytest.mark.parametrize(("chunk_size", "computed", "kept"), [(8, 7, 0), (8, 8, 2), (8, 9, 2), (6, 11, 1), (6, 12, 3)])
def test_the_blocks_before_the_current_chunk_are_freed(chunk_size, computed, kept):
    pool = BlockPool(16)
    manager = ChunkedLocalManager(pool, chunked(chunk_size), 0, 4)
    manager.adopt("r", [], 0)
    manager.allocate("r", 16)
    manager.drop_out_of_window("r", computed)
    assert manager.table("r").block_ids == [0] * kept + [1, 2, 3, 4][kept:]
    assert pool.num_used == 4 - kept
    manager.free("r")
    assert pool.num_used == 0
    pool.check_integrity()


@pytest.mark.parametrize(("chunk_size", "block_size"), [(8, 4), (6, 4), (2, 4), (5, 4), (12, 8), (1, 4)])
@pytest.mark.parametrize("step", [1, 3, 8])
def test_the_peak_is_reached_and_never_exceeded(chunk_size, block_size, step):
    """Over all places at which a step may begin."""
    manager = ChunkedLocalManager(BlockPool(16), chunked(chunk_size, block_size), 0, block_size)
    held = [
        -(-(start + step) // block_size) - manager.first_read(start) for start in range(10 * chunk_size * block_size)
    ]
    assert manager.peak_blocks(1000, step) == max(held)
    assert manager.peak_blocks(3, step) == 1
