"""What a folder made with sentence-transformers says, and what is refused."""

import json

import pytest

from pagemill.artifacts.describe import describe
from pagemill.artifacts.sentence_pooling import SentencePooling, sentence_pooling
from pagemill.errors import ModelError

MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
MODE = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
CONFIG = {"vocab_size": 99, "max_position_embeddings": 77}


def write(folder, modules=MODULES, mode=MODE):
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    return folder


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (MODE, "LAST"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "MEAN"),
        ({"pooling_mode_cls_token": True}, "CLS"),
        ({"pooling_mode": "mean"}, "MEAN"),
    ],
)
def test_pooling(tmp_path, mode, kind):
    assert sentence_pooling(write(tmp_path, mode=mode)) == SentencePooling(kind, True)
    assert sentence_pooling(write(tmp_path, MODULES[:2], mode)) == SentencePooling(kind, False)


def test_other_folders(tmp_path):
    assert sentence_pooling(tmp_path) is None


@pytest.mark.parametrize(
    ("modules", "mode", "words"),
    [
        ([*MODULES, {"type": "sentence_transformers.models.Dense"}], MODE, "Dense is not supported"),
        (MODULES[:1], MODE, "no pooling module"),
        ([{"type": "x.Pooling", "path": "../elsewhere"}], MODE, "'../elsewhere'"),
        (MODULES, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not supported"),
        (MODULES, MODE | {"pooling_mode_mean_tokens": True}, "lasttoken, pooling_mode_mean_tokens is not supported"),
        (MODULES, {}, "pooling by nothing"),
        ({"not": "a list"}, MODE, "damaged"),
    ],
)
def test_refused(tmp_path, modules, mode, words):
    with pytest.raises(ModelError, match=words):
        sentence_pooling(write(tmp_path, modules, mode))


@pytest.mark.parametrize(
    ("architecture", "known_as", "has_head"),
    [("Qwen3Model", "Qwen3ForCausalLM", False), ("Qwen3ForCausalLM", "Qwen3ForCausalLM", True)],
)
def test_facts(tmp_path, architecture, known_as, has_head):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": [architecture]}))
    (tmp_path / "model.safetensors").touch()
    plain = describe("mine", tmp_path)
    assert (plain.architecture, plain.has_head, plain.pooling_type) == (known_as, has_head, None)
    made = describe("mine", write(tmp_path, MODULES[:2]))
    assert (made.pooling_type, made.normalizes) == ("LAST", False)


def test_what_is_no_model_at_all(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["CLIPModel"]}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="'CLIPModel' is not supported"):
        describe("mine", tmp_path)
