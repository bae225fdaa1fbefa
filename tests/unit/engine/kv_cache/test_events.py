"""Events are what the pool finds: nothing missing, nothing twice, nothing too much."""

from itertools import chain

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.events import NO_EVENTS, EventRecorder, wire_hash
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.kv_cache.prefix_hash import GROUP_BYTES, PrefixHasher
from pagemill.engine.request import Request
from pagemill.messages.engine_io import LoRARequest, MultimodalItem
from pagemill.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from tests.examples import examples
from tests.fakes.engine_setup import chunked, core_request, full, mamba, sliding
from tests.fakes.kv_subscriber import StrictSubscriber, findable


def plan(*specs, num_blocks=20):
    return KVCacheConfig(num_blocks, tuple(KVCacheGroup((f"layer{i}",), spec) for i, spec in enumerate(specs)))


def manager(*specs, num_blocks=20):
    return KVCacheManager(plan(*(specs or [full()]), num_blocks=num_blocks), "sha256", record_events=True)


def new_request(name, prompt, **options):
    return Request(core_request(name, prompt, **options), sequence=0, max_model_len=10_000)


def admit(kv, request):
    kv.begin_step()
    kv.begin(request, kv.cached_prefix(request), request.num_tokens)
    kv.commit(request, request.num_tokens)
    return kv.take_events()


def numbers(request):
    return [wire_hash(digest) for digest in request.block_hashes]


def test_consecutive_blocks_are_one_event():
    kv, request = manager(), new_request("a", 11)
    (event,) = admit(kv, request)
    assert event == BlockStored(
        block_hashes=numbers(request),
        parent_block_hash=None,
        token_ids=[*range(1, 9)],
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    assert kv.take_events() == ()


def test_a_hash_is_the_last_eight_bytes():
    assert wire_hash(bytes(range(32))) == 0x18191A1B1C1D1E1F


def test_what_others_cached_is_not_stored_again_and_names_the_parent():
    kv = manager()
    admit(kv, new_request("a", 8))
    longer = new_request("b", 12)
    (event,) = admit(kv, longer)
    assert event.block_hashes == numbers(longer)[2:]
    assert event.parent_block_hash == numbers(longer)[1]
    assert event.token_ids == [9, 10, 11, 12]


def test_a_duplicate_is_neither_stored_nor_removed_as_long_as_one_is_left():
    kv = manager(num_blocks=8)
    first, second = new_request("a", 8), new_request("b", 8)
    stored = admit(kv, first)
    assert [len(event.block_hashes) for event in stored] == [2]
    # Only the last token's block is computed again, and is a duplicate.
    assert admit(kv, second) == ()
    kv.free(first)
    assert kv.take_events() == ()
    kv.free(second)
    assert kv.take_events() == ()
    (removed, _) = admit(kv, new_request("c", [7] * 27))
    assert isinstance(removed, BlockRemoved)
    assert sorted(removed.block_hashes) == sorted(numbers(first))


def test_a_gap_in_what_is_new_begins_another_event():
    request = new_request("a", 16)
    recorder = EventRecorder(plan(full()))
    pool = BlockPool(20, [recorder])
    PrefixHasher("sha256", 4).extend(request)
    keys = [digest + bytes(GROUP_BYTES) for digest in request.block_hashes]
    recorder.begin(request, 1)
    pool.commit(pool.allocate(1)[0], keys[1])
    recorder.take()
    recorder.begin(request, 0)
    for key in keys:
        pool.commit(pool.allocate(1)[0], key)
    before, after = recorder.take()
    assert (before.block_hashes, before.parent_block_hash) == (numbers(request)[:1], None)
    assert (after.block_hashes, after.parent_block_hash) == (numbers(request)[2:], numbers(request)[1])
    assert after.token_ids == [*range(9, 17)]


def test_groups_are_told_apart():
    kv, request = manager(full(8), sliding(6), chunked(8), mamba()), new_request("a", 16)
    wide, window, chunk, states = admit(kv, request)
    assert (wide.group_idx, wide.block_size, wide.kv_cache_spec_kind) == (0, 8, "full_attention")
    assert wide.block_hashes == numbers(request)[1::2]
    assert (window.group_idx, window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window) == (
        1,
        "sliding_window",
        6,
    )
    assert (chunk.kv_cache_spec_kind, chunk.kv_cache_spec_sliding_window) == ("chunked_local_attention", None)
    assert states.kv_cache_spec_kind == "mamba"


def test_extra_keys_are_those_of_the_hash():
    item = MultimodalItem(content_hash="cafe", offset=6, num_tokens=4)
    kv = manager()
    lora = LoRARequest(name="adapter", lora_id=3, path="")
    (event,) = admit(kv, new_request("a", 16, salt="s\ud800", lora=lora, mm_items=[item]))
    assert (event.lora_id, event.lora_name) == (3, "adapter")
    assert event.extra_keys[1:] == [(("cafe", 2),), (("cafe", -2),), None]
    salt, name = event.extra_keys[0]
    assert (salt[0], name) == ("s", "adapter")
    msgspec.msgpack.encode(event)


def test_a_reset_clears():
    kv, request = manager(), new_request("a", 8)
    admit(kv, request)
    assert kv.reset() is False
    assert kv.take_events() == ()
    kv.free(request)
    assert kv.reset() is True
    assert kv.take_events() == [AllBlocksCleared()]


def test_nothing_is_recorded_unless_asked_for():
    kv = KVCacheManager(plan(full()), "sha256")
    assert admit(kv, new_request("a", 12)) == ()
    assert NO_EVENTS.take() == ()


def test_a_block_of_nobody_is_a_defect():
    recorder = EventRecorder(plan(full()))
    with pytest.raises(RuntimeError, match="stored for no request"):
        recorder.stored(b"key" + bytes(GROUP_BYTES), 1)
    recorder.begin(new_request("a", 8), 0)
    with pytest.raises(RuntimeError, match="none of Request"):
        recorder.stored(b"key" + bytes(GROUP_BYTES), 1)


PROMPTS = [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2], [3, 3, 1, 1, 1, 1], [1, 1], [4, 4, 4, 4, 4, 4]]


class Pool(RuleBasedStateMachine):
    """Blocks are taken, committed (equal keys often), shared, freed and forgotten, in any order."""

    def __init__(self):
        super().__init__()
        self.recorder = EventRecorder(plan(full(2), sliding(3, 2)))
        self.pool = BlockPool(9, [self.recorder])
        self.subscriber = StrictSubscriber()
        self.held = []
        hasher = PrefixHasher("sha256", 2)
        self.requests = [new_request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
        self.known = {}
        for request in self.requests:
            hasher.extend(request)
            hashes = numbers(request)
            for index, (parent, number) in enumerate(zip([None, *hashes], hashes, strict=False)):
                self.known[number] = (parent, request.token_ids[index * 2 : index * 2 + 2].tolist())

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(1, self.pool.num_free))
        self.held.append(self.pool.allocate(count))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), group=st.integers(0, 1))
    def commit(self, data, group):
        """Some of a request's blocks, from anywhere on, as far as blocks without a key last."""
        request = data.draw(st.sampled_from(self.requests))
        first = data.draw(st.integers(0, len(request.block_hashes) - 1))
        skipped = data.draw(st.sets(st.integers(0, 3)))
        cached = self.pool.cached_blocks()
        blocks = [block for block in dict.fromkeys(chain.from_iterable(self.held)) if block not in cached]
        self.recorder.begin(request, first)
        wanted = [index for index in range(first, len(request.block_hashes)) if index not in skipped]
        for index, block in zip(wanted, blocks, strict=False):
            self.pool.commit(block, request.block_hashes[index] + group.to_bytes(GROUP_BYTES, "big"))

    @precondition(lambda self: self.pool.cached_blocks())
    @rule(data=st.data())
    def touch(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.pool.cached_blocks())), unique=True, min_size=1))
        self.pool.touch(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def forget_all(self):
        self.pool.forget_all()

    @rule()
    def read(self):
        """Batches end anywhere."""
        self.subscriber.apply(self.recorder.take())
        assert set(self.subscriber.cached) == findable(self.pool)

    @invariant()
    def the_pool_is_sound(self):
        self.pool.check_integrity()

    def teardown(self):
        self.read()
        for (_, number), stored in self.subscriber.cached.items():
            assert stored == self.known[number]


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
