"""The layout on the wire: subscribers decode by position."""

import msgspec

from pagemill.messages.kv_events import MEDIUM_DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


def decoded(*events, rank=0):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, events, rank)))


def test_a_batch_is_time_events_and_rank():
    assert decoded(AllBlocksCleared(), rank=3) == [1.5, [["AllBlocksCleared"]], 3]


def test_fields_stand_where_subscribers_expect_them():
    stored = BlockStored(
        block_hashes=[2**64 - 1],
        parent_block_hash=7,
        token_ids=[1, 2],
        block_size=2,
        lora_id=5,
        medium=MEDIUM_DEVICE,
        lora_name="adapter",
        extra_keys=[("salt", ("item", -1))],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=512,
    )
    keys = [["salt", ["item", -1]]]
    assert decoded(stored, BlockRemoved([3, 4], MEDIUM_DEVICE, 1))[1] == [
        ["BlockStored", [2**64 - 1], 7, [1, 2], 2, 5, "GPU", "adapter", keys, 1, "sliding_window", 512],
        ["BlockRemoved", [3, 4], "GPU", 1],
    ]


def test_what_is_not_known_is_nil():
    stored = BlockStored([1], None, [1], 1, None, MEDIUM_DEVICE, None, group_idx=0)
    assert decoded(stored, BlockRemoved([1], MEDIUM_DEVICE, 0))[1] == [
        ["BlockStored", [1], None, [1], 1, None, "GPU", None, None, 0, None, None],
        ["BlockRemoved", [1], "GPU", 0],
    ]
