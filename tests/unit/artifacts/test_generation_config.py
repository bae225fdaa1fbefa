import json

import pytest

from pagemill.artifacts.generation_config import (
    FILE,
    GenerationConfig,
    named_generation_config,
    overridden,
    read_generation_config,
)
from pagemill.errors import ConfigError, ModelError

QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(QWEN | {"eos_token_id": [5, 6], "max_new_tokens": 2048}))
    return tmp_path


def test_every_recommendation_that_has_an_effect_is_read(folder):
    found = read_generation_config(folder)
    assert found.defaults == {name: QWEN[name] for name in QWEN if name != "do_sample"} | {"max_new_tokens": 2048}
    assert found.eos_token_ids == (5, 6)
    assert found.unused == {}


def test_a_folder_without_one_recommends_nothing(tmp_path):
    assert read_generation_config(tmp_path) == GenerationConfig()


def test_what_has_no_effect_is_found(folder):
    content = {"length_penalty": 1.1, "num_beams": 1, "typical_p": 1.0, "do_sample": True}
    (folder / FILE).write_text(json.dumps(content))
    assert read_generation_config(folder) == GenerationConfig(unused={"length_penalty": 1.1})


@pytest.mark.parametrize("value", ["high", True, [1]])
def test_a_value_that_is_no_number(folder, value):
    (folder / FILE).write_text(json.dumps({"top_p": value}))
    with pytest.raises(ModelError, match=r"generation_config.json: top_p=.* is not a number"):
        read_generation_config(folder)


def test_a_folder_or_a_file_by_name(folder):
    assert named_generation_config(str(folder)) == named_generation_config(str(folder / FILE))
    with pytest.raises(ConfigError, match=r"generation_config='.*none' is not allowed: auto, vllm, or a folder"):
        named_generation_config(str(folder / "none"))


def test_overrides_win_and_null_takes_one_back(folder):
    found = overridden(read_generation_config(folder), {"temperature": 0.1, "top_k": None, "eos_token_id": 9})
    assert found.defaults == {
        **{"temperature": 0.1, "top_p": 0.8, "repetition_penalty": 1.05},
        "max_new_tokens": 2048,
    }
    assert found.eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"typical_p": 0.5}, "override_generation_config has 'typical_p'; what it may have: temperature, .*max_new"),
        ({"temperature": "hot"}, "override_generation_config: temperature='hot' is not a number"),
        ({"eos_token_id": [-1]}, "override_generation_config: eos_token_id=.* is not a token id"),
    ],
)
def test_overrides_that_mean_nothing(overrides, message):
    with pytest.raises(ConfigError, match=message):
        overridden(GenerationConfig(), overrides)
