"""What a configuration of GPT-NeoX may say, and what its checkpoints call things."""

from pathlib import Path

import pytest
import torch

from pagemill.errors import ModelError
from pagemill.model.loading.weight_map import Target
from pagemill.model.models.gpt_neox import GPTNeoXForCausalLM
from tests.fakes.compressed_checkpoint import edit_config
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint

TOKENS = list(range(3, 40))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "turns 3 elements of a head"),
        ({"rope_parameters": {"partial_rotary_factor": 0.01}}, "turns 0 elements of a head"),
        ({"hidden_act": "snake"}, "activation 'snake' is not supported; known: gelu,"),
        ({"layer_norm_eps": None}, "has no layer_norm_eps"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = make_checkpoint(tmp_path, "GPTNeoXForCausalLM")
    edit_config(path, **changes)
    with pytest.raises(ModelError, match=words):
        PagedModel.load(path)


def test_a_configuration_in_the_older_form_is_the_same_model(tmp_path: Path) -> None:
    """Pythia's files have rotary_pct and rotary_emb_base in place of rope_parameters."""
    path = make_checkpoint(tmp_path, "GPTNeoXForCausalLM")
    wanted = PagedModel.load(path).logits(TOKENS)
    edit_config(path, rope_parameters=None, rotary_pct=0.5, rotary_emb_base=10000)
    assert torch.equal(PagedModel.load(path).logits(TOKENS), wanted)
    edit_config(path, rotary_pct=0.25)
    assert not torch.equal(PagedModel.load(path).logits(TOKENS), wanted)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gpt_neox.embed_in.weight", Target("embed_tokens", "weight", 0)),
        ("embed_out.weight", Target("lm_head", "weight", 0)),
        ("gpt_neox.layers.1.mlp.dense_h_to_4h.bias", Target("layers.1.mlp.up_proj", "bias", 0)),
        ("gpt_neox.layers.1.attention.masked_bias", None),
    ],
)
def test_names_of_checkpoints(name: str, target: Target | None) -> None:
    assert GPTNeoXForCausalLM.weights.target(name) == target
    if target is not None:
        assert GPTNeoXForCausalLM.weights.source_name(target) == name
