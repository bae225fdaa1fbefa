"""Prefixes are reused to the token: which block is copied, and when none is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.request import Request
from pagemill.errors import ConfigError
from pagemill.messages.block_copies import BlockCopy
from pagemill.messages.engine_io import LoRARequest, MultimodalItem
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from tests.examples import examples
from tests.fakes.engine_setup import chunked, core_request, full, mamba, sliding

TOKENS = list(range(100, 200))


def manager(*specs, num_blocks=40, algorithm="sha256"):
    specs = specs or (full(),)
    groups = tuple(KVCacheGroup((f"layer{index}",), spec) for index, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(num_blocks + 1, groups), algorithm, partial_reuse=True)


def new_request(name, prompt, **options):
    return Request(core_request(name, prompt, **options), sequence=0, max_model_len=10_000)


def begin(kv, request, num_tokens=None):
    """Admit a request in a step of its own; its cached tokens, its table in the first group, the copies."""
    num_tokens = num_tokens or request.num_tokens
    kv.begin_step()
    prefix = kv.cached_prefix(request)
    tables = kv.begin(request, prefix, num_tokens)
    kv.commit(request, num_tokens)
    kv.check_integrity()
    return prefix.num_tokens, tables[0], kv.take_copies()


def cached(kv, prompt, **options):
    kv.begin_step()
    return kv.cached_prefix(new_request("query", prompt, **options)).num_tokens


def test_the_matching_head_of_the_next_block_is_copied():
    kv = manager()
    begin(kv, new_request("a", TOKENS[:12]))
    num_tokens, table, copies = begin(kv, new_request("b", [*TOKENS[:7], 1, 2, 3]))
    assert num_tokens == 7
    assert table == [1, 4, 5]
    assert copies == [BlockCopy(2, 4)]
    assert kv.managers[0].table("b").num_committed == 2, "the copied block is full: it has a hash of its own"


def test_a_block_is_no_source_in_the_step_that_fills_it():
    kv = manager()
    kv.begin_step()
    for name in "ab":
        request = new_request(name, [*TOKENS[:7], ord(name)])
        prefix = kv.cached_prefix(request)
        assert prefix.num_tokens == (0 if name == "a" else 4)
        kv.begin(request, prefix, 8)
        kv.commit(request, 8)
    assert cached(kv, [*TOKENS[:7], 9, 9]) == 7


def test_the_last_token_is_computed_even_if_all_are_known():
    kv = manager()
    begin(kv, new_request("a", TOKENS[:8]))
    assert cached(kv, TOKENS[:8]) == 7
    assert cached(kv, TOKENS[:9]) == 8
    assert cached(kv, TOKENS[:6]) == 5
    assert cached(kv, TOKENS[:5]) == 4
    assert cached(kv, TOKENS[:1]) == 0


def test_the_last_block_of_a_request_is_a_source_while_it_runs_and_after():
    kv = manager()
    request = new_request("a", TOKENS[:6])
    begin(kv, request)
    assert cached(kv, TOKENS[:12]) == 6
    for _ in range(5):
        request.token_ids.append(TOKENS[request.num_tokens])
        kv.grow(request, request.num_tokens - 1, request.num_tokens)
    assert cached(kv, TOKENS[:12]) == 6, "nobody said that more is computed"
    kv.free(request, num_computed=10)
    assert cached(kv, TOKENS[:12]) == 10
    kv.check_integrity()


def test_steps_in_flight_may_have_computed_more_than_is_known():
    kv = manager()
    request = new_request("a", TOKENS[:6])
    begin(kv, request)
    kv.free(request, num_computed=7)
    assert cached(kv, TOKENS[:12]) == 6


def test_a_source_is_forgotten_when_its_block_is_taken():
    kv = manager(num_blocks=3)
    first = new_request("a", TOKENS[:6])
    begin(kv, first)
    kv.free(first, 6)
    assert cached(kv, TOKENS[:9]) == 6
    begin(kv, new_request("b", [7] * 8))
    assert cached(kv, TOKENS[:9]) == 4
    kv.check_integrity()


def test_a_source_that_is_taken_for_the_copy_needs_none():
    kv = manager(num_blocks=1)
    first = new_request("a", TOKENS[:3])
    begin(kv, first)
    kv.free(first, 3)
    assert begin(kv, new_request("b", [*TOKENS[:2], 5, 5])) == (2, [1], [])


def test_a_destination_may_be_the_source_of_another_group():
    """The pool is as large as the request: what is free is taken, and the first group takes the second one's source."""
    kv = manager(full(), sliding(9), num_blocks=2)
    first = new_request("a", TOKENS[:3])
    assert begin(kv, first)[1] == [1]
    kv.free(first, 3)
    assert kv.pool.free_blocks() == [1, 2]
    kv.pool.touch([1])
    kv.pool.free([1])
    assert kv.pool.free_blocks() == [2, 1]
    copies = begin(kv, new_request("b", [*TOKENS[:2], 5]))[2]
    assert copies == [BlockCopy(1, 2), BlockCopy(2, 1)]


def test_each_group_copies_its_own_block():
    kv = manager(full(), sliding(5))
    begin(kv, new_request("a", TOKENS[:12]))
    held = [group.table("a").block_ids for group in kv.managers]
    assert held == [[1, 2, 3], [4, 5, 6]]
    copies = begin(kv, new_request("b", [*TOKENS[:7], 1, 2]))[2]
    assert copies == [BlockCopy(2, 7), BlockCopy(5, 9)]


def test_the_group_with_least_in_common_decides():
    """Of the first request, only the full group still has the second block."""
    kv = manager(full(), sliding(3), num_blocks=9)
    first = new_request("a", TOKENS[:12])
    begin(kv, first)
    other = new_request("b", [*TOKENS[:5], 7])
    assert begin(kv, other)[0] == 5
    assert cached(kv, TOKENS[:8]) == 7
    kv.drop_out_of_window(first, 12)
    assert kv.pool.free_blocks() == [9, 5]
    kv.pool.allocate(2)
    assert cached(kv, TOKENS[:8]) == 5


def test_blocks_of_different_sizes_copy_within_the_smallest():
    kv = manager(full(8), sliding(9, 4))
    begin(kv, new_request("a", TOKENS[:30]))
    num_tokens, _, copies = begin(kv, new_request("b", [*TOKENS[:23], 1, 2]))
    assert num_tokens == 16 + 3
    assert len(copies) == 2
    assert cached(kv, [*TOKENS[:18], 1, 2]) == 18


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_salts_and_adapters_stay_apart_in_the_first_block_and_behind_it(algorithm):
    kv = manager(algorithm=algorithm)
    begin(kv, new_request("a", TOKENS[:7], salt="a"))
    assert cached(kv, TOKENS[:7], salt="a") == 6
    assert cached(kv, TOKENS[:3], salt="a") == 2
    for options in ({}, {"salt": "b"}, {"salt": "a", "lora": LoRARequest("one", 1, "/one")}):
        assert cached(kv, TOKENS[:7], **options) == 0
        assert cached(kv, TOKENS[:3], **options) == 0


def test_blocks_with_different_images_stay_apart():
    kv = manager()
    cat, dog = (MultimodalItem(5, 2, name) for name in ("cat", "dog"))
    begin(kv, new_request("a", TOKENS[:8], mm_items=[cat]))
    assert cached(kv, TOKENS[:8], mm_items=[cat]) == 7
    assert cached(kv, TOKENS[:8], mm_items=[dog]) == 4
    assert cached(kv, TOKENS[:8]) == 4


def test_without_the_switch_nothing_is_copied_or_kept():
    config = KVCacheConfig(20, (KVCacheGroup(("layer",), full()),))
    kv = KVCacheManager(config, "sha256")
    request = new_request("a", TOKENS[:7])
    assert begin(kv, request)[2] == []
    kv.free(request, 7)
    assert cached(kv, TOKENS[:7]) == 4


def test_reset_forgets_sources():
    kv = manager()
    request = new_request("a", TOKENS[:7])
    begin(kv, request)
    kv.free(request, 7)
    assert kv.reset()
    assert cached(kv, TOKENS[:7]) == 0


def test_states_cannot_be_cut():
    with pytest.raises(ConfigError, match=r"enable_partial_block_reuse=True: layer 'layer1' .*MambaSpec"):
        manager(full(), mamba())


def test_a_request_that_does_not_fit_leaves_the_sources():
    kv = manager(num_blocks=3)
    request = new_request("a", TOKENS[:6])
    begin(kv, request)
    kv.begin_step()
    other = new_request("b", TOKENS[:17])
    assert kv.begin(other, kv.cached_prefix(other), 17) is None
    assert cached(kv, TOKENS[:17]) == 6


class Naive:
    """What every block holds, for every group: written at the end of a step, gone when the block is taken."""

    def __init__(self, kv):
        self.kv = kv
        self.held = [{} for _ in kv.managers]
        self.soon = []

    def begin_step(self):
        for group, block, known in self.soon:
            self.held[group][block] = known
        self.soon = []

    def took(self, blocks):
        for block in blocks:
            for group in self.held:
                group.pop(block, None)

    def computed(self, request, count):
        for group, manager in enumerate(self.kv.managers):
            table = manager.table(request.request_id).block_ids
            for index in range(-(-count // 4)):
                if table[index]:
                    known = (request.cache_salt, index, tuple(request.token_ids[: min(count, index * 4 + 4)]))
                    self.soon.append((group, table[index], known))

    def head(self, request, start):
        """Tokens behind `start` that a block of every group holds."""
        tokens = tuple(request.token_ids[:-1])
        most = min(3, len(tokens) - start)
        for group in self.held:
            longest = 0
            for salt, index, known in group.values():
                if salt == request.cache_salt and index * 4 == start and known[:start] == tokens[:start]:
                    same = [one == other for one, other in zip(known[start:], tokens[start:], strict=False)]
                    longest = max(longest, [*same, False].index(False))
            most = min(most, longest)
        return most


@pytest.mark.slow
@given(
    specs=st.sampled_from([(full(),), (sliding(3),), (full(), sliding(5)), (full(), chunked(6), sliding(1))]),
    num_blocks=st.integers(5, 12),
    work=st.lists(
        st.tuples(
            st.lists(st.integers(1, 2), min_size=1, max_size=14),
            st.integers(0, 3),
            st.sampled_from([None, None, "a"]),
            st.integers(0, 2),
        ),
        max_size=25,
    ),
)
@settings(max_examples=examples(150), deadline=None)
def test_as_much_is_reused_as_any_block_holds(specs, num_blocks, work):
    """Requests come, generate a few tokens and go, one or two at a time."""
    kv = manager(*specs, num_blocks=num_blocks * len(specs))
    naive, live = Naive(kv), []
    for number, (prompt, num_generated, salt, num_kept) in enumerate(work):
        request = new_request(str(number), prompt, salt=salt)
        kv.begin_step()
        naive.begin_step()
        full_tokens = kv.coordinator.cached_prefix(_hashed(kv, request), request.num_tokens - 1)[0]
        prefix = kv.cached_prefix(request)
        assert prefix.num_tokens == full_tokens + naive.head(request, full_tokens)
        tables = kv.begin(request, prefix, request.num_tokens)
        if tables is not None:
            naive.took(block for new, old in zip(tables, prefix.block_ids, strict=True) for block in new[len(old) :])
            kv.commit(request, request.num_tokens)
            naive.computed(request, request.num_tokens)
            live.append(request)
            _generate(kv, naive, request, num_generated)
        while len(live) > num_kept:
            gone = live.pop(0)
            naive.computed(gone, gone.num_tokens)
            kv.free(gone, gone.num_tokens)
        kv.check_integrity()


def _hashed(kv, request):
    kv.cached_prefix(request)
    return request.block_hashes


def _generate(kv, naive, request, count):
    for _ in range(count):
        kv.begin_step()
        naive.begin_step()
        computed = request.num_tokens
        grown = kv.grow(request, computed, computed + 1)
        if grown is None:
            return
        naive.took(block for blocks in grown for block in blocks)
        request.token_ids.append(1 + computed % 2)
        kv.commit(request, computed + 1)
        naive.computed(request, computed + 1)
