import json

import pytest

from pagemill.artifacts.hf_config import laid_over, read_folder, require_safetensors, with_classic_rope
from pagemill.errors import ModelError

CONFIG = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "torch_dtype": "float16"}


def folder_with(tmp_path, config=CONFIG, generation=None):
    (tmp_path / "config.json").write_text(json.dumps(config) if not isinstance(config, str) else config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_facts_of_a_folder(tmp_path):
    generation = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 40, "top_p": None, "do_sample": True}
    generation["repetition_penalty"] = 1.1
    found = read_folder(folder_with(tmp_path, generation=generation))
    assert (found.architecture, found.dtype) == ("LlamaForCausalLM", "float16")
    assert found.eos_token_ids == (5, 6)
    assert found.generation.defaults == {"temperature": 0.6, "top_k": 40, "repetition_penalty": 1.1}
    assert found.generation.unused == {}


def test_end_token_falls_back_to_config(tmp_path):
    assert read_folder(folder_with(tmp_path, generation={"eos_token_id": None})).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({}, "float32"),
        ({"torch_dtype": "float8_e4m3fn"}, "bfloat16"),
    ],
)
def test_dtype(tmp_path, config, dtype):
    assert read_folder(folder_with(tmp_path, {"architectures": ["X"], **config})).dtype == dtype


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", r"config.json is damaged"),
        ("[]", "not a JSON object"),
        ("[" * 200_000, "damaged"),
        ({}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        (CONFIG | {"eos_token_id": "x"}, "eos_token_id='x' is not a token id"),
    ],
)
def test_damage_is_named(tmp_path, config, message):
    with pytest.raises(ModelError, match=message):
        read_folder(folder_with(tmp_path, config))


def test_no_config(tmp_path):
    with pytest.raises(ModelError, match=r"has no config.json"):
        read_folder(tmp_path)


def test_weights(tmp_path):
    with pytest.raises(ModelError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        require_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="safetensors are needed"):
        require_safetensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}))
    (tmp_path / "1.safetensors").touch()
    with pytest.raises(ModelError, match=r"lacks 2.safetensors$"):
        require_safetensors(tmp_path)
    (tmp_path / "2.safetensors").touch()
    require_safetensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match="weight_map is not"):
        require_safetensors(tmp_path)
    (tmp_path / "model.safetensors").touch()
    require_safetensors(tmp_path)


def test_newer_rope_parameters_get_their_classic_names():
    flat = with_classic_rope({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    assert (flat["rope_theta"], flat["rope_scaling"]) == (5e5, None)
    scaled = with_classic_rope({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0}})
    assert scaled["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    per_layer = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    flat = with_classic_rope({"rope_parameters": per_layer})
    assert (flat["rope_theta"], flat["rope_local_base_freq"]) == (1e6, 1e4)


def test_classic_rope_stays():
    config = {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}
    assert with_classic_rope(config)["rope_theta"] == 1.0
    assert "rope_scaling" not in config


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ({"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_type": "default"}),
        ({"rope_scaling": LINEAR}, {"rope_theta": 5e5, **LINEAR}),
        ({"rope_theta": 1e6, "rope_scaling": LINEAR}, {"rope_theta": 1e6, **LINEAR}),
        ({"rope_parameters": LINEAR}, LINEAR),
        ({"hidden_size": 8}, {"rope_theta": 5e5, "rope_type": "default"}),
    ],
)
def test_overrides_by_classic_names_count_in_newer_files(overrides, wanted):
    config = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "hidden_size": 64}
    found = laid_over(config, overrides)
    assert found["rope_parameters"] == wanted
    assert found == config | overrides | {"rope_parameters": wanted}
    assert laid_over({"hidden_size": 64}, overrides) == {"hidden_size": 64} | overrides


def test_overrides_of_layers_of_two_kinds():
    kinds = {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    changes = {"rope_theta": 2e6, "rope_scaling": None, "rope_local_base_freq": 3e4}
    assert laid_over({"rope_parameters": kinds}, changes)["rope_parameters"] == {
        "full_attention": {"rope_theta": 2e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 3e4},
    }


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "awq"),
    ],
)
def test_settings_that_older_checkpoints_have_in_a_file_of_their_own(tmp_path, name, content, method):
    folder = folder_with(tmp_path)
    (folder / name).write_text(json.dumps(content))
    assert read_folder(folder).config["quantization_config"] == content | {"quant_method": method}
    own = {"quant_method": "fp8"}
    assert (
        read_folder(folder_with(tmp_path, CONFIG | {"quantization_config": own})).config["quantization_config"] == own
    )
