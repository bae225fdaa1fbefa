"""The block with most of its beginning in common, out of all that are there."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.kv_cache.block_heads import BlockHeads
from pagemill.engine.kv_cache.block_pool import IntegrityError

NUM_BLOCKS = 9

heads_of_tokens = st.lists(st.sampled_from([0, 1, 2, 255, 256, 70_000]), min_size=1, max_size=5)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, NUM_BLOCKS - 1), st.sampled_from([b"x", b"y"]), heads_of_tokens),
        st.tuples(st.just("forget"), st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=3)),
        st.tuples(st.just("begin_step")),
    ),
    max_size=30,
)


def packed(*tokens):
    return array("i", tokens).tobytes()


def num_common(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@given(changes, st.sampled_from([b"x", b"y"]), heads_of_tokens)
def test_nothing_beats_what_is_found(steps, past, query):
    heads = BlockHeads(NUM_BLOCKS)
    found, added = {}, {}
    for name, *arguments in steps:
        if name == "add":
            block, its_past, tokens = arguments
            heads.add(block, its_past, packed(*tokens))
            added[block] = (its_past, tokens)
        elif name == "forget":
            heads.taken(*arguments)
            for block in arguments[0]:
                found.pop(block, None)
                added.pop(block, None)
        else:
            heads.begin_step()
            found |= added
            added = {}
        heads.check_integrity()
        assert len(heads) == len(found)
    common = {block: num_common(tokens, query) for block, (its_past, tokens) in found.items() if its_past == past}
    block, count = heads.longest(past, packed(*query))
    assert count == max(common.values(), default=0)
    assert block == 0 if not count else common[block] == count


def test_what_is_added_is_found_from_the_next_step_on():
    heads = BlockHeads(4)
    heads.add(1, b"x", packed(5, 6))
    assert heads.longest(b"x", packed(5, 6, 7)) == (0, 0)
    heads.begin_step()
    heads.add(1, b"x", packed(5, 6, 7))
    assert heads.longest(b"x", packed(5, 6, 7)) == (1, 2), "the former beginning remains true"
    heads.begin_step()
    assert heads.longest(b"x", packed(5, 6, 7)) == (1, 3)


def test_a_block_taken_before_the_step_that_fills_it_is_never_found():
    heads = BlockHeads(4)
    heads.add(1, b"x", packed(5))
    heads.taken([1])
    heads.begin_step()
    assert heads.longest(b"x", packed(5)) == (0, 0)
    assert len(heads) == 0


def test_clear_forgets_everything():
    heads = BlockHeads(4)
    heads.add(1, b"x", packed(5))
    heads.begin_step()
    heads.add(2, b"x", packed(5))
    heads.cleared()
    heads.begin_step()
    assert len(heads) == 0
    heads.check_integrity()


def test_integrity_notices_a_block_out_of_order():
    heads = BlockHeads(4)
    heads.add(1, b"x", packed(5))
    heads.add(2, b"x", packed(6))
    heads.begin_step()
    heads._by_past[b"x"].reverse()
    with pytest.raises(IntegrityError, match="not the sorted ones"):
        heads.check_integrity()
    heads._by_past[b"x"] = [2]
    with pytest.raises(IntegrityError, match="1 blocks can be found"):
        heads.check_integrity()
