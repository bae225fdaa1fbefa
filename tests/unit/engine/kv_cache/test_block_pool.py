"""The free list's order, lazy eviction, duplicates, and that contradictions are noticed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.kv_cache.block_pool import BlockPool, IntegrityError
from tests.examples import examples


def test_blocks_are_taken_in_order_and_the_null_block_never():
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 4)
    with pytest.raises(IntegrityError, match="1 blocks were asked for, and 0 are free"):
        pool.allocate(1)


def test_blocks_are_freed_last_one_first():
    pool = BlockPool(6)
    held = pool.allocate(3)
    pool.free(held)
    assert pool.free_blocks() == [4, 5, 3, 2, 1]


def test_shared_blocks_are_free_when_the_last_holder_lets_go():
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.touch(held)
    pool.free(held)
    assert pool.free_blocks() == [3]
    pool.free(held)
    assert pool.free_blocks() == [3, 2, 1]


def test_held_blocks_are_counted_and_the_null_block_is_not_one():
    pool = BlockPool(6)
    held = pool.allocate(2)
    assert pool.count_held([0, *held, 3, 4, 0]) == 2
    pool.free(held)
    assert pool.count_held(held) == 0


def test_touching_takes_blocks_out_of_the_middle_of_the_free_list():
    pool = BlockPool(6)
    pool.free(pool.allocate(3))
    pool.touch([5, 3, 0])
    assert pool.free_blocks() == [4, 2, 1]
    pool.check_integrity()


def test_a_cached_block_is_found_until_it_is_taken_again():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.commit(block, b"key")
    pool.free([block])
    assert pool.find(b"key") == block
    assert pool.allocate(1) == [2]
    assert pool.find(b"key") == block
    assert pool.allocate(1) == [block]
    assert pool.find(b"key") is None
    pool.check_integrity()


def test_a_duplicate_loses_its_key_when_freed_and_takes_over_when_the_first_is():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.commit(first, b"key")
    pool.commit(second, b"key")
    assert pool.find(b"key") == first
    pool.free([first])
    assert pool.find(b"key") == second
    assert pool.cached_blocks() == {second: b"key"}
    pool.free([second])
    assert pool.find(b"key") == second
    pool.check_integrity()


def test_misuse_is_noticed():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.commit(block, b"key")
    with pytest.raises(IntegrityError, match="has a key already"):
        pool.commit(block, b"other")
    pool.free([block])
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free([block])
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)


@pytest.mark.parametrize("name", ["_ref_counts", "_next", "_prev", "_keys"])
def test_check_integrity_notices_a_changed_entry(name):
    pool = BlockPool(6)
    pool.commit(pool.allocate(2)[0], b"key")
    pool.check_integrity()
    values = getattr(pool, name)
    values[3] = {"_ref_counts": 1, "_next": 2, "_prev": 1, "_keys": b"key"}[name]
    with pytest.raises(IntegrityError):
        pool.check_integrity()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "free", "share", "commit"]), st.integers(0, 7)), max_size=40))
def test_the_pool_behaves_like_a_plain_list(actions):
    pool, free, holders, keys = BlockPool(9), list(range(1, 9)), [], {}
    for action, number in actions:
        if action == "take" and number <= len(free):
            taken, free = free[:number], free[number:]
            assert pool.allocate(number) == taken
            holders.append(taken)
            keys = {block: key for block, key in keys.items() if block not in taken}
        elif action == "free" and holders:
            blocks = holders.pop(number % len(holders))
            pool.free(blocks)
            free += [block for block in reversed(blocks) if not any(block in other for other in holders)]
        elif action == "share" and holders:
            holders.append(list(holders[number % len(holders)]))
            pool.touch(holders[-1])
        elif action == "commit" and holders:
            for block in holders[number % len(holders)]:
                if block not in keys:
                    keys[block] = b"%d" % block
                    pool.commit(block, keys[block])
        pool.check_integrity()
        assert pool.free_blocks() == free
        assert pool.cached_blocks() == keys
