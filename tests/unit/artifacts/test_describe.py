import json

import pytest

from pagemill.artifacts import aliases, hub
from pagemill.artifacts.describe import describe, locate
from pagemill.errors import ModelError
from tests.unit.artifacts.gguf_builder import VOCAB, write_gguf

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 99, "max_position_embeddings": 77, "dtype": "bfloat16"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 3}')
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_folder(folder):
    facts = describe("mine", folder)
    assert (facts.name, facts.path, facts.weights_format) == ("mine", str(folder), "safetensors")
    assert (facts.architecture, facts.dtype) == ("LlamaForCausalLM", "bfloat16")
    assert (facts.vocab_size, facts.max_position, facts.eos_token_ids) == (99, 77, (3,))
    assert facts.generation_defaults == {"temperature": 0.5}


def test_neutral_sampling(folder):
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "typical_p": 0.9}')
    assert describe("mine", folder).unused_generation_defaults == {"typical_p": 0.9}
    assert describe("mine", folder, generation_config="vllm").unused_generation_defaults == {}
    assert describe("mine", folder, generation_config="vllm").generation_defaults == {}


def test_sampling_of_another_folder_and_overrides(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text('{"top_k": 9}')
    facts = describe("mine", folder, generation_config=str(other), override_generation_config={"max_new_tokens": 7})
    assert facts.generation_defaults == {"top_k": 9, "max_new_tokens": 7}
    assert facts.eos_token_ids == (3,)
    assert describe("mine", folder, override_generation_config={"temperature": None}).generation_defaults == {}
    facts = describe("mine", folder, generation_config="vllm", override_generation_config={"eos_token_id": [8, 9]})
    assert (facts.generation_defaults, facts.eos_token_ids) == ({}, (8, 9))


def test_overrides_win(folder):
    overrides = {
        "max_position_embeddings": 12,
        "rope_parameters": {"rope_theta": 7.0},
        "architectures": ["Qwen3ForCausalLM"],
    }
    facts = describe("mine", folder, hf_overrides=overrides)
    assert (facts.max_position, facts.hf_config["rope_theta"]) == (12, 7.0)
    assert facts.architecture == "Qwen3ForCausalLM"


def test_dummy_weights_need_no_files(folder):
    (folder / "model.safetensors").unlink()
    assert describe("mine", folder, load_format="dummy").weights_format == "dummy"
    with pytest.raises(ModelError, match="has no weights"):
        describe("mine", folder)


def test_unsupported_architecture_lists_the_supported_ones(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["GPTJForCausalLM"]}))
    words = r"'GPTJForCausalLM' is not supported; supported: .*Gemma3ForCausalLM, .*LlamaForCausalLM"
    with pytest.raises(ModelError, match=words):
        describe("mine", folder)


def test_load_format_that_does_not_fit(folder):
    with pytest.raises(ModelError, match="load_format='gguf', but the weights are safetensors"):
        describe("mine", folder, load_format="gguf")


@pytest.mark.parametrize("value", [None, 0, "many", True])
def test_sizes_must_be_positive(folder, value):
    with pytest.raises(ModelError, match=r"vocab_size=.* is not (allowed: an|a positive) integer"):
        describe("mine", folder, hf_overrides={"vocab_size": value})


def test_gguf(tmp_path):
    facts = describe("mine", write_gguf(tmp_path / "m.gguf", keys=lambda writer: writer.add_eos_token_id(4)))
    assert (facts.weights_format, facts.architecture) == ("gguf", "LlamaForCausalLM")
    assert (facts.vocab_size, facts.max_position, facts.eos_token_ids) == (VOCAB, 128, (4,))


def test_locate_paths(folder, tmp_path_factory):
    assert locate(str(folder)) == folder
    other = tmp_path_factory.mktemp("gguf")
    (other / "only.gguf").touch()
    assert locate(str(other / "only.gguf")) == other / "only.gguf"
    assert locate(str(other)) == other / "only.gguf"
    (other / "second.gguf").touch()
    with pytest.raises(ModelError, match=r"several .gguf files; name one: only.gguf, second.gguf"):
        locate(str(other))


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-has-this-name/model"])
def test_locate_names_that_no_file_can_have(name):
    with pytest.raises(ModelError, match=r"no such file or folder \((OSError|RuntimeError): ") as caught:
        locate(name)
    assert len(str(caught.value)) < 500


def test_locate_alias(monkeypatch, tmp_path):
    monkeypatch.setattr(aliases, "fetch", lambda alias: tmp_path / alias)
    assert locate("smollm2") == tmp_path / "smollm2"


def test_locate_hub_id(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(hub, "snapshot", lambda *given, **more: seen.append((*given, more)) or tmp_path)
    assert locate("org/name", "main", "/elsewhere") == tmp_path
    assert seen == [("org/name", "main", "/elsewhere", {"weights": True, "ignore_patterns": ()})]


@pytest.mark.parametrize("model", ["/no/such", "./no-such", "../x/y", "org/name.gguf", "~/no-such-folder"])
def test_paths_that_are_not_there(model):
    with pytest.raises(ModelError, match="no such file or folder"):
        locate(model)


@pytest.mark.parametrize("model", ["no-such-model", "a/b/c", "", "org/na me"])
def test_names_that_are_nothing(model):
    with pytest.raises(
        ModelError, match=r"is not an alias \(known: smollm2\), not a file or folder here, and not a hub"
    ):
        locate(model)


@pytest.mark.model
def test_default_model(smollm2_path):
    facts = describe("smollm2", smollm2_path)
    assert (facts.vocab_size, facts.max_position, facts.dtype) == (49152, 8192, "bfloat16")
    assert facts.hf_config["rope_theta"] == 100_000.0
    assert facts.eos_token_ids == (2,)
