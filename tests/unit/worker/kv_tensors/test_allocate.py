"""n groups of m layers on m tensors: who shares memory with whom, and that a block is one piece of it."""

import pytest
import torch

from pagemill.engine.kv_cache.planning import plan_kv_cache
from pagemill.errors import ConfigError, PagemillError
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from pagemill.worker.kv_tensors.allocate import bind_kv_cache
from tests.fakes.engine_setup import full, mamba
from tests.fakes.hybrid_model import HybridModel


@pytest.fixture
def bound():
    """(plan, layers, tensors) of the model with every kind of layer, in blocks of 4 tokens."""
    layers = HybridModel().cache_layers()
    specs = {name: layer.kv_spec(4, "float32") for name, layer in layers.items()}
    plan = plan_kv_cache(specs, 1 << 20, max_model_len=64, max_step_tokens=64, num_blocks_override=100)
    return plan, layers, bind_kv_cache(plan, layers, "cpu")


def address(layer):
    return (layer.states[0] if hasattr(layer, "states") else layer.cache).data_ptr()


def test_the_i_th_layers_of_all_groups_share_the_i_th_tensor(bound):
    plan, layers, tensors = bound
    assert len(plan.groups) == 5
    assert len(tensors) == max(len(group.layers) for group in plan.groups)
    for group in plan.groups:
        assert [address(layers[name]) for name in group.layers] == [
            tensor.data_ptr() for tensor, _ in zip(tensors, group.layers, strict=False)
        ]
    assert {tensor.numel() for tensor in tensors} == {100 * plan.groups[0].spec.page_bytes()}


def test_groups_of_several_layers_use_a_tensor_each():
    kinds = ("full", "sliding")
    named = {f"{kind}.{index}": HybridModel().cache_layers()[kind] for kind in kinds for index in range(3)}
    specs = {name: layer.kv_spec(4, "float32") for name, layer in named.items()}
    groups = tuple(KVCacheGroup(tuple(f"{kind}.{index}" for index in range(3)), specs[f"{kind}.0"]) for kind in kinds)
    tensors = bind_kv_cache(KVCacheConfig(9, groups), named, "cpu")
    assert len({tensor.data_ptr() for tensor in tensors}) == 3
    for index, tensor in enumerate(tensors):
        assert address(named[f"full.{index}"]) == address(named[f"sliding.{index}"]) == tensor.data_ptr()


def test_a_reader_has_its_owners_tensor(bound):
    _, layers, _ = bound
    assert layers["reader"].cache.data_ptr() == layers["sliding"].cache.data_ptr()
    assert layers["reader"].cache.shape == layers["sliding"].cache.shape


def test_a_block_is_the_same_bytes_for_every_layer(bound):
    """Whatever a layer writes to block 7, nothing outside of page 7 changes."""
    plan, layers, tensors = bound
    page_bytes = plan.groups[0].spec.page_bytes()
    for group in plan.groups:
        layer, tensor = layers[group.layers[0]], tensors[0]
        tensor.zero_()
        for view in layer.states if hasattr(layer, "states") else [layer.cache.transpose(0, 1)]:
            view[7] = 1
        touched = tensor.view(-1, page_bytes).any(1).nonzero().flatten().tolist()
        assert touched == [7]


def test_states_do_not_overlap(bound):
    _, layers, _ = bound
    first, second = layers["state.0"].states
    assert (first.dtype, first.shape) == (torch.bfloat16, (100, 32))
    assert (second.dtype, second.shape) == (torch.float32, (100, 2, 16))
    first.fill_(1)
    second.fill_(2)
    assert first.unique().tolist() == [1]


def test_unequal_pages_are_refused():
    plan = KVCacheConfig(4, (KVCacheGroup(("a",), full()), KVCacheGroup(("b",), mamba(100))))
    with pytest.raises(ConfigError, match=r"unequal page sizes \[32, 400\]"):
        bind_kv_cache(plan, {}, "cpu")


def test_a_layer_without_memory_says_so():
    layers = HybridModel().cache_layers()
    with pytest.raises(PagemillError, match="full has no KV cache yet"):
        _ = layers["full"].cache
    with pytest.raises(PagemillError, match=r"state\.0 has no memory for its states yet"):
        _ = layers["state.0"].states


@pytest.mark.parametrize("num_blocks", [1 << 50, 1 << 70])
def test_a_cache_that_no_memory_holds_is_one_line(num_blocks):
    layers = {"full": HybridModel().cache_layers()["full"]}
    specs = {name: layer.kv_spec(4, "float32") for name, layer in layers.items()}
    plan = plan_kv_cache(specs, 1 << 20, max_model_len=64, max_step_tokens=64, num_blocks_override=num_blocks)
    with pytest.raises(ConfigError, match=r"no memory for a KV cache of \d+ bytes; lower --num-gpu-blocks-override"):
        bind_kv_cache(plan, layers, "cpu")
