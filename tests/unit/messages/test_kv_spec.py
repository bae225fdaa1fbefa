"""Sizes of KV cache specs."""

from pagemill.messages.kv_spec import FullAttentionSpec, SlidingWindowSpec


def test_page_bytes_count_keys_and_values():
    assert FullAttentionSpec(16, num_kv_heads=3, head_size=64, dtype="bfloat16").page_bytes() == 2 * 16 * 3 * 64 * 2
    assert FullAttentionSpec(8, num_kv_heads=1, head_size=80, dtype="float32").page_bytes() == 2 * 8 * 80 * 4


def test_a_full_layer_holds_every_block():
    spec = FullAttentionSpec(16, 1, 64, "bfloat16")
    assert [spec.max_blocks(length) for length in (1, 16, 17, 160)] == [1, 1, 2, 10]


def test_a_window_holds_one_block_more_than_it_fills():
    spec = SlidingWindowSpec(16, 1, 64, "bfloat16", window=32)
    assert [spec.max_blocks(length) for length in (1, 16, 17, 33, 1000)] == [1, 1, 2, 3, 3]
