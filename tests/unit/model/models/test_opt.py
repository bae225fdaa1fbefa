"""What a configuration of OPT may say, and what its checkpoints call things."""

from pathlib import Path

import pytest

from pagemill.errors import ModelError
from pagemill.model.loading.weight_map import Target
from pagemill.model.models.opt import OPTForCausalLM
from tests.fakes.compressed_checkpoint import edit_config
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"do_layer_norm_before": False}, "do_layer_norm_before=False is not supported for OPT"),
        ({"word_embed_proj_dim": 32}, "word_embed_proj_dim=32 is not supported for OPT"),
        ({"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True is not supported for OPT"),
        ({"ffn_dim": None}, "has no ffn_dim"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = make_checkpoint(tmp_path, "OPTForCausalLM")
    edit_config(path, **changes)
    with pytest.raises(ModelError, match=words):
        PagedModel.load(path)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("model.decoder.final_layer_norm.bias", Target("norm", "bias", 0)),
        ("model.decoder.layers.1.final_layer_norm.bias", Target("layers.1.norm", "bias", 0)),
        ("model.decoder.layers.1.self_attn.out_proj.bias", Target("layers.1.self_attn.o_proj", "bias", 0)),
        ("model.decoder.layers.1.self_attn.k_proj.weight", Target("layers.1.self_attn.qkv_proj", "weight", 1)),
    ],
)
def test_names_of_checkpoints(name: str, target: Target | None) -> None:
    assert OPTForCausalLM.weights.target(name) == target
    if target is not None:
        assert OPTForCausalLM.weights.source_name(target) == name
