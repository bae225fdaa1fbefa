"""Groups, sizes, and what is said when one request does not fit."""

import pytest

from pagemill.engine.kv_cache.planning import WorkerMemory, group_size, merge_specs, plan_kv_cache
from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import FullAttentionSpec, SharedKVSpec
from tests.fakes.engine_setup import chunked, full, mamba, sliding


def layers(num_sliding, num_full, window=32):
    """A model whose sliding layers come first, as in Gemma."""
    specs = {f"sw.{index}": sliding(window, 16) for index in range(num_sliding)}
    return specs | {f"full.{index}": full(16) for index in range(num_full)}


def plan(specs, available_bytes=1 << 20, length=64, step=64, override=None, **settings):
    return plan_kv_cache(
        specs, available_bytes, max_model_len=length, max_step_tokens=step, num_blocks_override=override, **settings
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


def test_the_toy_model_has_a_group_per_layer():
    config = plan(layers(3, 1))
    assert [group.layers for group in config.groups] == [("full.0",), ("sw.0",), ("sw.1",), ("sw.2",)]
    assert config.num_blocks == (1 << 20) // full(16).page_bytes()


def test_five_kinds_of_layers_are_grouped_too():
    """Full attention, two windows, chunks and states; the rarest kind makes the groups, the last ones are padded."""
    kinds = {"full": full(16), "wide": sliding(64, 16), "narrow": sliding(8, 16), "chunk": chunked(32, 16)}
    counts = {"full": 3, "wide": 9, "narrow": 4, "chunk": 5, "state": 7}
    specs = {f"{kind}.{index}": (kinds | {"state": mamba()})[kind] for kind in counts for index in range(counts[kind])}
    config = plan(specs)
    sizes = {}
    for group in config.groups:
        sizes.setdefault(group.layers[0].split(".")[0], []).append(len(group.layers))
        assert {specs[name] for name in group.layers} == {specs[group.layers[0]]}
    assert sizes == {"full": [3], "wide": [3, 3, 3], "narrow": [3, 1], "chunk": [3, 2], "state": [3, 3, 1]}
    assert {group.spec.page_bytes() for group in config.groups} == {128}
    assert config.num_blocks == (1 << 20) // (128 * 3)


@pytest.mark.parametrize(
    ("counts", "size"),
    [
        ([52, 10], 10),
        ([20, 10], 10),
        ([30, 20], 10),
        ([15, 3], 3),
        ([22, 4], 4),
        ([24, 25], 25),
        ([7], 7),
        ([3, 9, 4, 5], 3),
    ],
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
    specs = {name: full() for name in "abcd"}
    page = full().page_bytes()

    def num_blocks(*memory):
        return plan(
            specs, [WorkerMemory(layers, pages * page) for layers, pages in memory], length=4, step=4
        ).num_blocks

    assert num_blocks(("abcd", 103)) == 25
    assert num_blocks(("abc", 30), ("d", 100)) == 10
    assert num_blocks(("abc", 3000), ("d", 7)) == 7
    assert num_blocks(("abcd", 100), ("abcd", 60)) == 15, "tensor-parallel workers hold the same layers"


@pytest.mark.parametrize(("head_size", "num_blocks"), [(2, 20), (1, 40)])
def test_layers_of_a_draft_model_count_on_the_stage_that_has_them(head_size, num_blocks):
    """Layers that keep the same have tensors of their own; those of another kind are a group in the same tensors."""
    model = {name: full(head_size=2) for name in "abcd"}
    draft = {f"draft.{name}": full(head_size=head_size) for name in "ab"}
    page = full(head_size=2).page_bytes()
    memory = [WorkerMemory("ab", 100 * page), WorkerMemory(["c", "d", *draft], 80 * page)]
    assert plan(model | draft, memory, length=4, step=4).num_blocks == num_blocks


def test_a_model_with_states_needs_memory_for_them_beside_its_tokens():
    """Ten blocks for 160 tokens, and two for states: a step of 16 tokens reads one and writes up to two, the first of
    which may be in place of what it read."""
    specs = {"full": full(16), "state": mamba(32, block_size=16)}
    assert plan(specs, length=160, step=16, override=13).num_blocks == 13
    with pytest.raises(ConfigError, match=r"max_model_len=160 needs 13 KV cache blocks .* --max-model-len 144 or less"):
        plan(specs, length=160, step=16, override=12)
    assert plan(specs, length=160, step=16, override=12, prefix_caching=False).num_blocks == 12
    with pytest.raises(ConfigError, match="--max-model-len 144 or less"):
        plan(specs, length=160, step=16, override=11, prefix_caching=False)


def test_a_chunk_and_a_step_must_fit():
    specs = {"a": chunked(8, 4)}
    assert plan(specs, length=1000, step=1, override=3).num_blocks == 3
    with pytest.raises(ConfigError, match="--max-model-len 4 or less"):
        plan(specs, length=1000, step=1, override=2)


def test_layers_that_read_anothers_cache_take_no_memory():
    specs = {"a": full(), "b": sliding(8), "c": SharedKVSpec(4, "b", sliding(8)), "d": SharedKVSpec(4, "a", full())}
    config = plan(specs)
    assert [group.layers for group in config.groups] == [("a",), ("b",)]
    assert config.shared == {"c": "b", "d": "a"}
    assert config.num_blocks == plan({"a": full(), "b": sliding(8)}).num_blocks


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SharedKVSpec(4, "gone", full()), "layer 'b' reads the KV cache of 'gone', which is no layer that keeps one"),
        (SharedKVSpec(4, "b", full()), "layer 'b' reads the KV cache of 'b', which is no layer that keeps one"),
        (SharedKVSpec(4, "a", sliding(8)), "layer 'b' reads SlidingWindowSpec.* of 'a', which keeps FullAttentionSpec"),
    ],
)
def test_what_is_read_must_be_kept(spec, message):
    with pytest.raises(ConfigError, match=message):
        plan({"a": full(), "b": spec})


def test_without_the_hybrid_manager_every_layer_keeps_every_token():
    specs = {**layers(5, 1), "chunk": chunked(8, 16), "reader": SharedKVSpec(16, "sw.0", sliding(32, 16))}
    config = plan(specs, hybrid=False)
    assert [type(group.spec) for group in config.groups] == [FullAttentionSpec]
    assert len(config.groups[0].layers) == 7
    assert config.shared == {"reader": "sw.0"}


def test_states_need_the_hybrid_manager():
    with pytest.raises(ConfigError, match=r"disable_hybrid_kv_cache_manager=True .* layer 's' keeps a state instead"):
        plan({"a": full(), "s": mamba()}, hybrid=False)
