"""Attention blocks that grow to the size of a state, and states that are padded to the size of a block."""

import dataclasses

import pytest

from pagemill.engine.kv_cache.page_sizes import equal_pages
from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import TOKENS_PER_STATE, FullAttentionSpec, MambaSpec
from tests.fakes.engine_setup import chunked, full, mamba, sliding


def test_attention_blocks_grow_until_a_page_holds_the_state():
    """Bamba-like: 2 x 8 heads x 128 x 2 bytes a token, and a state of 128 heads x 64 x 128 floats."""
    attention = FullAttentionSpec(16, 8, 128, "bfloat16")
    state = MambaSpec(16, ((10_240, 3), (128, 64, 128)), ("bfloat16", "float32"))
    equal = equal_pages({"attention": attention, "state": state})
    grown, padded = equal["attention"], equal["state"]
    assert grown.block_size == padded.block_size == 1040
    assert grown.page_bytes() == padded.page_bytes() == 1040 * 4096
    assert padded.state_bytes() == 10_240 * 3 * 2 + 128 * 64 * 128 * 4
    assert grown.page_bytes() - attention.page_bytes() < padded.state_bytes() <= grown.page_bytes()


def test_small_states_are_padded_and_blocks_stay():
    equal = equal_pages({"full": full(16), "state": mamba(8)})
    assert equal["full"] == full(16)
    assert equal["state"] == dataclasses.replace(mamba(8), block_size=16, padded_bytes=128)


def test_states_of_several_shapes_and_attention_of_several_kinds_have_one_page_size():
    specs = {"full": full(4, 2), "sliding": sliding(9), "chunk": chunked(8), "small": mamba(3), "large": mamba(70)}
    equal = equal_pages(specs)
    assert {spec.page_bytes() for spec in equal.values()} == {320}
    assert [equal[name].block_size for name in specs] == [20, 40, 40, 40, 40]


def test_without_cached_states_one_is_enough_for_the_longest_request():
    equal = equal_pages({"full": full(16), "state": mamba(8)}, state_tokens=1000)
    assert equal["full"].block_size == 16
    assert equal["state"].block_size == 1008


def test_models_of_states_alone_keep_few_of_them():
    equal = equal_pages({"a": mamba(8, block_size=16), "b": mamba(12, block_size=16)})
    assert equal["a"].block_size == equal["b"].block_size == TOKENS_PER_STATE
    assert equal["a"].page_bytes() == equal["b"].page_bytes() == 48
    assert equal_pages({"a": mamba(8, block_size=24)})["a"].block_size == 528


def test_attention_pages_that_do_not_divide_are_refused_beside_states_too():
    with pytest.raises(ConfigError, match="layer 'b' keeps 64 bytes per block, which does not divide the 96"):
        equal_pages({"a": full(head_size=3), "b": full(head_size=2), "state": mamba()})


def test_the_setting_is_named_where_only_scales_stand_in_the_way():
    """Gemma 4: heads of 256 in windows, of 512 elsewhere."""
    sizes = {"window": (16, 256), "full": (4, 512)}
    wide, narrow = (
        {name: FullAttentionSpec(16, heads, size, dtype) for name, (heads, size) in sizes.items()}
        for dtype in ("bfloat16", "int8")
    )
    assert {spec.block_size for spec in equal_pages(wide).values()} == {16, 32}
    with pytest.raises(ConfigError, match=r"of several sizes do not fit kv_cache_dtype=int8, .* leave out --kv-cache"):
        equal_pages(narrow)
    odd = {name: FullAttentionSpec(16, 1, size, "int8") for name, size in (("a", 2), ("b", 3))}
    with pytest.raises(ConfigError, match="such a model is not supported"):
        equal_pages(odd)
