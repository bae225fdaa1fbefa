"""The prefix that all groups agree on is the longest there is: compared with trying every length."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.coordinator import KVCacheCoordinator
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from tests.examples import examples
from tests.fakes.engine_setup import full, sliding
from tests.fakes.prefix_store import first_read

NUM_TOKENS = 24
HASHES = [b"%02d" % index for index in range(NUM_TOKENS)]
"""Of blocks of one token."""
SPECS = st.one_of(
    st.builds(full, st.sampled_from([1, 2, 4])),
    st.builds(sliding, st.integers(1, 9), st.sampled_from([1, 2, 4])),
)


def needed_blocks(spec, length):
    """Indices of the blocks that the token after `length` tokens reads."""
    return range(first_read(spec, length) // spec.block_size, length // spec.block_size)


@settings(max_examples=examples(150), deadline=None)
@given(specs=st.lists(SPECS, min_size=1, max_size=4), data=st.data())
def test_no_longer_prefix_is_cached(specs, data):
    specs = [full(1), *specs] if min(spec.block_size for spec in specs) > 1 else specs
    pool = BlockPool(1 + NUM_TOKENS * len(specs))
    groups = tuple(KVCacheGroup((), spec) for spec in specs)
    coordinator = KVCacheCoordinator(pool, KVCacheConfig(pool.num_blocks, groups))
    stride = coordinator.hash_block_size
    cached = []
    for group, spec in enumerate(specs):
        blocks = pool.allocate(NUM_TOKENS // spec.block_size)
        missing = data.draw(st.sets(st.integers(0, len(blocks) - 1), max_size=len(blocks) // 2))
        cached.append(set(range(len(blocks))) - missing)
        for index in cached[group]:
            key = HASHES[(index + 1) * spec.block_size // stride - 1]
            pool.commit(blocks[index], key + group.to_bytes(2, "big"))
    most = data.draw(st.integers(0, NUM_TOKENS))

    alignment = math.lcm(*(spec.block_size for spec in specs))
    longest = max(
        length
        for length in range(0, most + 1, alignment)
        if all(cached[group].issuperset(needed_blocks(spec, length)) for group, spec in enumerate(specs))
    )
    length, tables = coordinator.cached_prefix(HASHES, most)
    assert length == longest
    for spec, table in zip(specs, tables, strict=True):
        assert len(table) == length // spec.block_size
        assert all(table[index] for index in needed_blocks(spec, length))
