"""What an attention layer declares, and what it refuses."""

import pytest
import torch

from pagemill.catalog.attention import ATTENTION
from pagemill.errors import ModelError, PagemillError
from pagemill.messages.kv_spec import ChunkedLocalSpec, FullAttentionSpec, SharedKVSpec, SlidingWindowSpec
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.layer import Attention


def layer(kv_owner=None, **traits):
    spec = AttentionLayerSpec(4, 2, 8, 1.0, **traits)
    return Attention(spec, name="layer", backend=ATTENTION.resolve("TORCH_CPU"), kv_owner=kv_owner)


def test_what_a_layer_keeps_follows_from_what_it_sees():
    sizes = (16, 2, 8, "float32")
    assert layer().kv_spec(16, "float32") == FullAttentionSpec(*sizes)
    assert layer(window=9).kv_spec(16, "float32") == SlidingWindowSpec(*sizes, 9)
    assert layer(chunk_size=32).kv_spec(16, "float32") == ChunkedLocalSpec(*sizes, 32)
    shared = SharedKVSpec(16, "other", SlidingWindowSpec(*sizes, 9))
    assert layer(kv_owner="other", window=9).kv_spec(16, "float32") == shared


@pytest.mark.parametrize(
    ("traits", "first"), [({}, 0), ({"window": 4}, 7), ({"window": 40}, 0), ({"chunk_size": 4}, 8)]
)
def test_the_first_position_that_a_token_sees(traits, first):
    assert layer(**traits).spec.first_seen(10) == first


def test_a_window_and_chunks_exclude_each_other():
    with pytest.raises(ModelError, match="layer has window=4 and chunk_size=8; at most one may be set"):
        layer(window=4, chunk_size=8)


@pytest.mark.parametrize(("owner", "key"), [("other", torch.zeros(1, 2, 8)), (None, None)])
def test_keys_are_for_layers_that_keep_them(owner, key):
    with pytest.raises(PagemillError, match=f"layer has kv_owner={owner}, and key and value are for layers without"):
        layer(kv_owner=owner)(torch.zeros(1, 4, 8), key, key)


def test_a_backend_without_chunks_is_not_chosen_for_them():
    capability = ATTENTION.resolve("TORCH_CPU").capability
    plain = type(capability)(capability.devices, capability.dtypes)
    spec = AttentionLayerSpec(4, 2, 8, 1.0, chunk_size=8)
    assert plain.unsupported(spec, "cpu", "float32") == ["chunked local attention not supported"]
    assert capability.unsupported(spec, "cpu", "float32") == []


def test_a_cache_of_one_byte_floats_has_scales():
    spec = AttentionLayerSpec(4, 2, 8, 1.0)
    kept = Attention(spec, name="layer", backend=ATTENTION.resolve("TRITON_ATTN"))
    kv_spec = kept.kv_spec(16, "float8_e4m3fn")
    kept.bind(torch.zeros(3 * kv_spec.page_bytes(), dtype=torch.uint8), 3, kv_spec)
    assert (kept.cache.dtype, kept.cache.shape) == (torch.float8_e4m3fn, (3, 2, 16, 2, 8))
    assert (kept._impl.tensors.key_scale, kept._impl.tensors.value_scale) == (torch.ones(1), torch.ones(1))
    wide = layer()
    kv_spec = wide.kv_spec(16, "float32")
    wide.bind(torch.zeros(3 * kv_spec.page_bytes(), dtype=torch.uint8), 3, kv_spec)
    assert wide._impl.tensors.key_scale is None
