"""What the files of heads say, as EAGLE publishes them and in the format of speculators."""

import json
from pathlib import Path

import pytest

from pagemill.artifacts.heads import Speculator, describe_head, head_method, speculator_of
from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from tests.fakes.tiny_heads import make_head

MODEL = ModelFacts(
    "m", "/m", "safetensors", "Qwen3ForCausalLM", {"num_hidden_layers": 36, "hidden_size": 64}, "float32", 512, 320
)


def written(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_method_is_found(tmp_path):
    assert head_method(make_head(tmp_path / "a", "eagle3")) == "eagle3"
    assert head_method(make_head(tmp_path / "b", "eagle")) == "eagle"
    plain = make_head(tmp_path / "c", "eagle")
    config = json.loads((plain / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    assert head_method(written(plain, **config)) == "eagle"
    assert describe_head("c", plain, MODEL, "eagle", "auto").architecture == "EagleLlamaForCausalLM"
    assert head_method(written(tmp_path, architectures=["Qwen3ForCausalLM"])) is None
    assert head_method(tmp_path / "nothing") is None


def test_a_speculator_says_what_it_is_for(tmp_path):
    folder = make_head(tmp_path, "eagle3", speculators="Qwen/Qwen3-8B", draft_vocab_size=100)
    assert speculator_of(folder) == Speculator("eagle3", "Qwen/Qwen3-8B", 3)
    facts = describe_head("s", folder, MODEL, "eagle3", "auto")
    assert (facts.architecture, facts.vocab_size, facts.max_position) == ("Eagle3LlamaForCausalLM", 100, 512)
    assert facts.hf_config["vocab_size"] == 320
    assert facts.hf_config["own_head"]
    assert not facts.hf_config["own_embeddings"]
    assert speculator_of(make_head(tmp_path / "plain", "eagle3")) is None


def test_layers_that_are_read_by_default(tmp_path):
    folder = make_head(tmp_path, "eagle3")
    config = json.loads((folder / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    facts = describe_head("h", written(folder, **config), MODEL, "eagle3", "auto")
    assert facts.hf_config["eagle_aux_hidden_state_layer_ids"] == [2, 18, 33]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 9, 30], "norm_before_fc": True}
    facts = describe_head("h", written(folder, **config), MODEL, "eagle3", "auto")
    assert facts.hf_config["eagle_aux_hidden_state_layer_ids"] == [1, 9, 30]
    assert facts.hf_config["norm_before_fc"]


def test_weights_are_not_needed_to_measure(tmp_path):
    folder = make_head(tmp_path, "eagle3", draft_vocab_size=100)
    (folder / "model.safetensors").unlink()
    facts = describe_head("h", folder, MODEL, "eagle3", "dummy")
    assert (facts.weights_format, facts.hf_config["own_head"]) == ("dummy", True)
    with pytest.raises(ModelError, match="has no weights"):
        describe_head("h", folder, MODEL, "eagle3", "auto")


DAMAGED = [
    (
        {"speculators_model_type": "dspark", "speculators_config": {}},
        "speculators_model_type='dspark' is not supported",
    ),
    ({"speculators_model_type": "eagle3", "speculators_config": {"verifier": {}}}, "names no verifier"),
    ({"speculators_model_type": "eagle3"}, "names no verifier"),
]


@pytest.mark.parametrize(("config", "message"), DAMAGED)
def test_a_speculator_that_says_nothing_of_use_is_refused(tmp_path, config, message):
    with pytest.raises(ModelError, match=message):
        speculator_of(written(tmp_path, **config))


def test_damaged_weights_are_refused(tmp_path):
    folder = make_head(tmp_path, "eagle3")
    for content in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]"):
        Path(folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=r"model.safetensors (cannot be read|is damaged)"):
            describe_head("h", folder, MODEL, "eagle3", "auto")
