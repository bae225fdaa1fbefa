"""Sizes of KV cache specs."""

import pytest

from pagemill.messages.kv_spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SharedKVSpec,
    SlidingWindowSpec,
    cache_dtype,
)


def test_page_bytes_count_keys_and_values():
    assert FullAttentionSpec(16, num_kv_heads=3, head_size=64, dtype="bfloat16").page_bytes() == 2 * 16 * 3 * 64 * 2
    assert FullAttentionSpec(8, num_kv_heads=1, head_size=80, dtype="float32").page_bytes() == 2 * 8 * 80 * 4


def test_a_full_layer_holds_every_block():
    spec = FullAttentionSpec(16, 1, 64, "bfloat16")
    assert [spec.max_blocks(length) for length in (1, 16, 17, 160)] == [1, 1, 2, 10]


def test_a_window_holds_one_block_more_than_it_fills():
    spec = SlidingWindowSpec(16, 1, 64, "bfloat16", window=32)
    assert [spec.max_blocks(length) for length in (1, 16, 17, 33, 1000)] == [1, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("chunk_size", "most"), [(32, 2), (16, 1), (8, 1), (24, 2), (10, 2), (40, 3), (34, 3), (35, 4)]
)
def test_a_chunk_may_begin_where_its_size_and_the_block_size_allow(chunk_size, most):
    spec = ChunkedLocalSpec(16, 1, 64, "bfloat16", chunk_size)
    assert spec.max_blocks(1000) == most
    assert spec.max_blocks(16) == 1


def test_states_are_counted_in_bytes_each_aligned():
    spec = MambaSpec(16, ((3, 5), (2, 2, 4)), ("bfloat16", "float32"))
    assert spec.offsets() == (0, 32)
    assert spec.state_bytes() == spec.page_bytes() == 32 + 64
    assert MambaSpec(16, ((4,),), ("float32",), padded_bytes=4096).page_bytes() == 4096


def test_a_request_holds_one_state_or_the_two_at_a_boundary():
    spec = MambaSpec(16, ((4,),), ("float32",))
    assert [spec.max_blocks(length) for length in (1, 16, 17, 1000)] == [1, 1, 2, 2]
    assert spec.default_blocks(65_536, num_requests=8) == 8 + 128


def test_a_layer_that_reads_another_keeps_nothing():
    kept = FullAttentionSpec(16, 1, 64, "bfloat16")
    spec = SharedKVSpec(16, "owner", kept)
    assert (spec.page_bytes(), spec.max_blocks(1000), spec.peak_blocks(1000, 64)) == (0, 0, 0)
    assert KVCacheConfig(1, (), {"a": "owner", "b": "other", "c": "owner"}).readers("owner") == ("a", "c")


def test_what_a_cache_is_made_of():
    assert cache_dtype("auto", "bfloat16") == "bfloat16"
    assert cache_dtype("float16", "bfloat16") == "float16"
    assert cache_dtype("fp8", "bfloat16") == cache_dtype("fp8_e4m3", "float16") == "float8_e4m3fn"
    assert FullAttentionSpec(16, 2, 8, cache_dtype("fp8_e5m2", "bfloat16")).page_bytes() == 2 * 16 * 2 * 8


def test_integers_have_their_scales_beside_them():
    assert cache_dtype("int8", "bfloat16") == cache_dtype("int8_per_token_head", "float32") == "int8"
    spec = FullAttentionSpec(16, 3, 64, "int8")
    assert (spec.row_elements(), spec.page_bytes()) == (68, 2 * 16 * 3 * (64 + 4))
    assert FullAttentionSpec(16, 3, 64, "bfloat16").page_bytes() / spec.page_bytes() > 1.88
