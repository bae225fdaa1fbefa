"""Groups, sizes, and what is said when one request does not fit."""

import pytest

from pagemill.engine.kv_cache.planning import group_size, merge_specs, plan_kv_cache, usable_bytes
from pagemill.errors import ConfigError
from tests.fakes.engine_setup import full, sliding


def layers(num_sliding, num_full, window=32):
    """A model whose sliding layers come first, as in Gemma."""
    specs = {f"sw.{index}": sliding(window, 16) for index in range(num_sliding)}
    return specs | {f"full.{index}": full(16) for index in range(num_full)}


def plan(specs, available_bytes=1 << 20, length=64, step=64, override=None):
    return plan_kv_cache(
        specs, available_bytes, max_model_len=length, max_step_tokens=step, num_blocks_override=override
    )


def test_one_kind_is_one_group():
    config = plan({f"layer{index}": full() for index in range(5)}, available_bytes=32 * 5 * 20 + 1)
    assert [len(group.layers) for group in config.groups] == [5]
    assert config.num_blocks == 20


def test_gemma_3_has_seven_groups():
    config = plan(layers(52, 10))
    assert [len(group.layers) for group in config.groups] == [10, 10, 10, 10, 10, 10, 2]
    assert config.groups[0].layers == tuple(f"full.{index}" for index in range(10))
    assert config.groups[1].layers == tuple(f"sw.{index}" for index in range(10))
    assert config.groups[6].layers == ("sw.50", "sw.51")
    assert config.num_blocks == (1 << 20) // (full(16).page_bytes() * 10)


def test_a_regular_pattern_has_three_groups():
    config = plan(layers(20, 10))
    assert [group.layers[0] for group in config.groups] == ["full.0", "sw.0", "sw.10"]
    assert {len(group.layers) for group in config.groups} == {10}


@pytest.mark.parametrize(
    ("counts", "size"),
    [([52, 10], 10), ([20, 10], 10), ([30, 20], 10), ([15, 3], 3), ([22, 4], 4), ([24, 25], 25), ([7], 7)],
)
def test_group_sizes(counts, size):
    assert group_size(counts) == size


def test_smaller_pages_get_larger_blocks():
    config = plan({"full": full(4, head_size=2), "sliding": sliding(8, 4)})
    assert [group.spec.block_size for group in config.groups] == [4, 8]
    assert len({group.spec.page_bytes() for group in config.groups}) == 1


def test_pages_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="layer 'b' keeps 64 bytes per block, which does not divide the 96"):
        plan({"a": full(head_size=3), "b": full(head_size=2)})


def test_no_layers_are_refused():
    with pytest.raises(ConfigError, match="no layer that keeps keys and values"):
        plan({})


def test_the_override_beats_the_memory():
    assert plan({"a": full()}, available_bytes=0, override=17).num_blocks == 17


def test_a_context_that_does_not_fit_names_the_largest_that_does():
    with pytest.raises(
        ConfigError, match=r"max_model_len=100 needs 26 KV cache blocks .*; use --max-model-len 64 or less"
    ):
        plan({"a": full()}, length=100, override=17)
    assert plan({"a": full()}, length=64, override=17).num_blocks == 17
    with pytest.raises(ConfigError, match=r"there are 1 .* bytes\); give more memory with --kv-cache-memory-bytes"):
        plan({"a": full()}, length=100, available_bytes=40)


def test_a_step_of_a_sliding_window_must_fit_beside_the_window():
    specs = {"a": sliding(8, 4)}
    assert plan(specs, length=1000, step=4, override=5).num_blocks == 5
    with pytest.raises(ConfigError, match="--max-model-len 20 or less"):
        plan(specs, length=1000, step=64, override=6)


def test_workers_must_agree_about_a_layer():
    assert merge_specs([{"a": full()}, {"a": full(), "b": full()}]) == {"a": full(), "b": full()}
    with pytest.raises(ConfigError, match="disagree about what layer 'a' keeps"):
        merge_specs([{"a": full()}, {"a": full(8)}])


def test_stages_keep_their_own_layers_only():
    first, last = {"a": full(), "b": full(), "c": full()}, {"d": full()}
    page = full().page_bytes()
    assert usable_bytes([first], [100 * page]) == 99 * page
    assert usable_bytes([first, last], [30 * page, 100 * page]) == 10 * 4 * page, "ten blocks fit on both"
    assert usable_bytes([first, last], [3000 * page, 7 * page]) == 7 * 4 * page


def test_tensor_parallel_workers_share_the_least():
    specs, page = {"a": full(), "b": full()}, full().page_bytes()
    assert usable_bytes([specs, specs], [100 * page, 60 * page]) == 60 * page
    assert usable_bytes([{}], [5]) == 5
