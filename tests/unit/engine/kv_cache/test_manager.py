"""Worked examples of prefix caching. The documents number blocks from 0; here block 0 is the null block, so theirs
are ours minus one."""

from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.request import Request
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from tests.fakes.engine_setup import chunked, core_request, full, mamba, sliding


def manager(num_blocks=10, specs=None, caching="sha256"):
    """`num_blocks` without the null block."""
    specs = specs or [full()]
    groups = tuple(KVCacheGroup((f"layer{index}",), spec) for index, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(num_blocks + 1, groups), caching)


def new_request(name, prompt, **options):
    return Request(core_request(name, prompt, **options), sequence=0, max_model_len=10_000)


def begin(kv, request, num_tokens=None):
    """Admit a request; (cached tokens, its table in the documents' numbers)."""
    num_tokens = num_tokens or request.num_tokens
    prefix = kv.cached_prefix(request)
    block_ids = kv.begin(request, prefix, num_tokens)
    kv.commit(request, num_tokens)
    kv.check_integrity()
    return prefix.num_tokens, documented(block_ids[0])


def generate(kv, request, *token_ids):
    """Append tokens and compute all but the last, as decoding does; the table's new blocks."""
    grown = []
    for token in token_ids:
        computed = request.num_tokens
        request.token_ids.append(token)
        grown += documented(kv.grow(request, computed, computed + 1)[0])
        kv.commit(request, computed + 1)
    kv.check_integrity()
    return grown


def documented(block_ids):
    return [block - 1 for block in block_ids]


def free_queue(kv):
    return documented(kv.pool.free_blocks())


def cached(kv):
    return sorted(documented(kv.pool.cached_blocks()))


def test_times_1_to_6_of_the_worked_example():
    kv = manager(10)
    tokens = list(range(100, 150))
    first = new_request("0", tokens[:15])
    assert begin(kv, first) == (0, [0, 1, 2, 3])  # time 1
    assert cached(kv) == [0, 1, 2]

    assert generate(kv, first, *tokens[15:17]) == [4]  # time 2
    assert cached(kv) == [0, 1, 2, 3]

    second = new_request("1", [*tokens[:10], 1, 2, 3, 4])
    assert begin(kv, second) == (8, [0, 1, 5, 6])  # time 3
    assert cached(kv) == [0, 1, 2, 3, 5]

    kv.free(first)  # time 4
    assert free_queue(kv) == [7, 8, 9, 4, 3, 2]
    assert cached(kv) == [0, 1, 2, 3, 5]

    kv.free(second)  # time 5
    assert free_queue(kv) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]

    prefix = kv.cached_prefix(new_request("2", [*tokens[:12], *range(17)]))  # time 6
    assert prefix.num_tokens == 12
    kv.pool.touch(prefix.block_ids[0])
    assert free_queue(kv) == [7, 8, 9, 4, 3, 6, 5]


def test_time_6_allocates_after_the_hits_are_taken_out_of_the_queue():
    kv = manager(10)
    tokens = list(range(100, 150))
    first, second = new_request("0", tokens[:15]), new_request("1", [*tokens[:10], 1, 2, 3, 4])
    begin(kv, first)
    generate(kv, first, *tokens[15:17])
    begin(kv, second)
    kv.free(first)
    kv.free(second)
    assert begin(kv, new_request("2", [*tokens[:12], *range(17)])) == (12, [0, 1, 2, 7, 8, 9, 4, 3])
    assert free_queue(kv) == [6, 5]


def test_duplicate_blocks_stay_until_the_request_is_freed():
    kv = manager(10)
    prompt, outputs = [1, 2, 3, 4, 5, 6], [7, 8, 9]
    first, second = new_request("1", prompt), new_request("2", prompt)
    assert begin(kv, first) == (0, [0, 1])
    assert generate(kv, first, *outputs) == [2]
    assert cached(kv) == [0, 1]

    assert begin(kv, second) == (4, [0, 3])
    assert generate(kv, second, 7) == []
    assert cached(kv) == [0, 1]
    generate(kv, second, 8)
    assert cached(kv) == [0, 1, 3]
    kv.free(second)
    assert cached(kv) == [0, 1]
    kv.free(first)
    assert cached(kv) == [0, 1]
    kv.check_integrity()


def test_hybrid_allocation_holds_eleven_blocks():
    """20 sliding and 10 full layers, blocks of 16, a window of 32: 112 tokens hold 7 + 2 + 2 blocks."""
    kv = manager(40, [full(16), sliding(32, 16), sliding(32, 16)])
    request = new_request("r", 112)
    tables = kv.begin(request, kv.cached_prefix(request), 112)
    assert [len(table) for table in tables] == [7, 7, 7]
    kv.commit(request, 112)
    kv.drop_out_of_window(request, 112)
    held = [[block for block in group.table("r").block_ids if block] for group in kv.managers]
    assert [len(blocks) for blocks in held] == [7, 2, 2]
    assert documented(held[0]) == [0, 1, 2, 3, 4, 5, 6]
    assert kv.pool.num_used == 11
    kv.check_integrity()


def test_the_eleven_blocks_of_the_worked_example():
    """The same tables as drawn: 0-6, then / / / / / 7 8 and / / / / / 9 10, for a request whose sliding layers begin
    with the window."""
    kv = manager(40, [full(16), sliding(32, 16), sliding(32, 16)])
    kv.managers[0].adopt("r", [], 0)
    for group in kv.managers[1:]:
        group.adopt("r", [0] * 5, 80)
    allocated = [documented(group.allocate("r", 112)) for group in kv.managers]
    assert allocated == [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10]]
    assert [group.table("r").block_ids[:5] for group in kv.managers[1:]] == [[0] * 5] * 2
    assert kv.pool.num_used == 11
    kv.check_integrity()


def test_chunks_and_states_free_what_is_not_read_again():
    """Chunks of 32: token 112 reads 96 to 111. States: it reads the one after token 111."""
    kv = manager(40, [full(16), chunked(32, 16), mamba(block_size=16)])
    request = new_request("r", 112)
    kv.begin_step()
    begin(kv, request)
    kv.drop_out_of_window(request, 112)
    held = [[index for index, block in enumerate(group.table("r").block_ids) if block] for group in kv.managers]
    assert held == [[0, 1, 2, 3, 4, 5, 6], [6], [6]]
    assert kv.pool.num_used == 9
    assert kv.coordinator.num_held("r") == 9
    assert kv.capacity(112) == 112
    kv.begin_step()
    prefix = kv.cached_prefix(new_request("other", 112))
    assert prefix.num_tokens == 96
    assert [sum(1 for block in ids if block) for ids in prefix.block_ids] == [6, 0, 1]
    kv.check_integrity()


def test_states_make_no_prefix_without_prefix_caching():
    """A block of states then lasts as long as a request, so that there is no boundary and one state each."""
    kv = manager(10, [full(4), mamba(block_size=64)], caching=None)
    first = new_request("1", 9)
    assert begin(kv, first) == (0, [0, 1, 2])
    assert generate(kv, first, *range(4)) == [4]
    assert kv.coordinator.num_held("1") == 5
    assert begin(kv, new_request("2", 9))[0] == 0


def test_the_last_token_is_never_cached():
    kv = manager(10)
    first = new_request("1", 8)
    begin(kv, first)
    assert begin(kv, new_request("2", 8))[0] == 4
    assert begin(kv, new_request("3", 9))[0] == 8


def test_generated_blocks_are_shared_while_the_request_runs():
    kv = manager(10)
    request = new_request("1", 3)
    begin(kv, request)
    generate(kv, request, 50, 51, 52, 53, 54)
    assert begin(kv, new_request("2", [1, 2, 3, 50, 51, 52, 53, 54, 9]))[0] == 8


def test_salted_requests_share_with_their_own_salt_only():
    kv = manager(20)
    begin(kv, new_request("1", 9, salt="a"))
    assert begin(kv, new_request("2", 9, salt="a"))[0] == 8
    assert begin(kv, new_request("3", 9, salt="b"))[0] == 0
    assert begin(kv, new_request("4", 9))[0] == 0


def test_nothing_is_shared_without_prefix_caching():
    kv = manager(10, caching=None)
    begin(kv, new_request("1", 9))
    assert begin(kv, new_request("2", 9)) == (0, [3, 4, 5])
    assert not kv.pool.cached_blocks()


def test_what_does_not_fit_changes_nothing():
    kv = manager(4)
    first = new_request("1", 12)
    begin(kv, first)
    before = kv.pool.free_blocks()
    other = new_request("2", [7] * 8)
    assert kv.begin(other, kv.cached_prefix(other), 8) is None
    assert kv.grow(first, 12, 17) is None
    assert kv.pool.free_blocks() == before
    assert kv.grow(first, 12, 16) == ([4],)
    kv.check_integrity()


def test_reset_empties_the_cache_of_an_idle_engine_only():
    kv = manager(10)
    request = new_request("1", 9)
    begin(kv, request)
    assert not kv.reset()
    kv.free(request)
    assert kv.usage() == 0
    assert kv.reset()
    assert kv.cached_prefix(new_request("2", 9)).num_tokens == 0


def test_groups_with_blocks_of_different_sizes_agree_on_a_common_multiple():
    kv = manager(40, [full(8), sliding(9, 4)])
    assert kv.granularity == 4
    first = new_request("1", 30)
    kv.begin(first, kv.cached_prefix(first), 30)
    kv.commit(first, 30)
    prefix = kv.cached_prefix(new_request("2", 30))
    assert prefix.num_tokens == 24
    assert [len(ids) for ids in prefix.block_ids] == [3, 6]
    assert prefix.block_ids[1][:4] == [0, 0, 0, 0]
    assert kv.capacity(30) == 32
