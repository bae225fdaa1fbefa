"""What a configuration of Gemma 4 may say: in the form of transformers, and in that of published files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.errors import ModelError
from tests.fakes.compressed_checkpoint import edit_config
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_families import FAMILIES, FULL, SLIDING

TOKENS = list(range(3, 40))


def checkpoint(folder: Path, case: str, **changes: Any) -> Path:
    architecture, fields = FAMILIES[case]
    return make_checkpoint(folder, architecture, **fields | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation='silu' is not supported for Gemma4ForCausalLM"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ({"use_bidirectional_attention": "some"}, "use_bidirectional_attention='some' is not allowed: true, false"),
        ({"per_layer_config": {"1": {"head_dim": 31}}}, "per_layer_config=.* is not allowed: an object of numbers"),
        ({"per_layer_config": {"1": {"sliding_window": 8}}}, "per_layer_config=.* is not allowed"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, r"layers of the kind 'full_attention', .*\[16, 32\]"),
        ({"layer_types": [SLIDING, "linear_attention", SLIDING, FULL]}, "layers of the kind 'linear_attention'"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers=3: no layer of the kind 'full_attention' is before"),
        ({"num_experts": 4, "enable_moe_block": True}, "has no (top_k_experts|moe_intermediate_size)"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = checkpoint(tmp_path, "gemma4-key-is-value")
    edit_config(path, **changes)
    with pytest.raises(ModelError, match=words):
        PagedModel.load(path)


def test_a_configuration_in_the_form_of_published_files_is_the_same_model(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "gemma4-key-is-value")
    wanted = PagedModel.load(path).logits(TOKENS)
    edit_config(path, per_layer_config=None, global_head_dim=32, num_global_key_value_heads=2)
    assert torch.equal(PagedModel.load(path).logits(TOKENS), wanted)
    edit_config(path, use_bidirectional_attention="vision", layer_types=[SLIDING, FULL, SLIDING, SLIDING])
    assert torch.equal(PagedModel.load(path).logits(TOKENS), wanted)


def test_numbers_of_layers_may_begin_with_zeros(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "gemma4-key-is-value")
    wanted = PagedModel.load(path).logits(TOKENS)
    heads = {"head_dim": 32, "num_key_value_heads": 2}
    edit_config(path, per_layer_config={"01": heads, "03": heads})
    assert torch.equal(PagedModel.load(path).logits(TOKENS), wanted)


@pytest.mark.slow
def test_kinds_heads_and_rotary_settings_that_are_left_out_are_those_of_the_published_models(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "gemma4-key-is-value", num_hidden_layers=6, layer_types=None, global_head_dim=512)
    wanted = PagedModel.load(path).logits(TOKENS)
    edit_config(path, per_layer_config=None, num_global_key_value_heads=2, layer_types=None)
    assert torch.equal(PagedModel.load(path).logits(TOKENS), wanted)
    edit_config(path, rope_parameters=None)
    found = PagedModel.load(path).model.rotaries
    assert found[SLIDING].cos.shape[1] == 16
    assert found[FULL].cos.shape[1] == 512
    assert int((found[FULL].sin[1] != 0).sum()) == 128  # a quarter is turned


def test_experts_that_are_not_enabled_are_not_there(tmp_path: Path) -> None:
    """enable_moe_block, not num_experts, says whether there are any."""
    path = checkpoint(tmp_path, "gemma4-key-is-value")
    wanted = PagedModel.load(path).logits(TOKENS)
    edit_config(path, num_experts=4, top_k_experts=2, enable_moe_block=False)
    assert torch.equal(PagedModel.load(path).logits(TOKENS), wanted)
