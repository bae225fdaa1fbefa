"""Pipelines that would make gigabytes of a word are refused when they are loaded."""

import json

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from pagemill.errors import ModelError
from pagemill.tokenizers.expansion import check_expansion
from pagemill.tokenizers.hf_folder import load
from tests.fakes.tiny_checkpoint import byte_tokenizer

GROWS = normalizers.Replace("a", "a" * 1000)
DOUBLES = normalizers.Replace("a", "aa")


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("normalizer", GROWS, "normalizer can make a text 1e.03 times as long; at most 16"),
        ("normalizer", normalizers.Sequence([GROWS] * 4), r"1e\+12 times"),
        ("normalizer", normalizers.Sequence([normalizers.Sequence([DOUBLES] * 3)] * 2), "64 times"),
        ("normalizer", normalizers.Replace(Regex("."), "x" * 17), "17 times"),
        ("normalizer", normalizers.Prepend("x" * 1000), "times"),
        ("normalizer", normalizers.Sequence([normalizers.NFC()] * 65), "has 65 steps; at most 64"),
        ("decoder", decoders.Replace("a", "a" * 1000), "decoder can make"),
        (
            "post_processor",
            processors.TemplateProcessing(single="<s> " * 65 + "$A", special_tokens=[("<s>", 1)]),
            "puts 66 tokens around a text",
        ),
    ],
)
def test_what_multiplies_is_refused(name, part, words):
    backend = byte_tokenizer()
    setattr(backend, name, part)
    with pytest.raises(ModelError, match=words):
        check_expansion("f", backend)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("normalizer", normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
        ("normalizer", normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.StripAccents()])),
        ("normalizer", normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()])),
        ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])),
        ("decoder", decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
        (
            "post_processor",
            processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]),
        ),
    ],
)
def test_what_models_do_is_allowed(name, part):
    backend = byte_tokenizer()
    setattr(backend, name, part)
    check_expansion("f", backend)


def test_a_folder_with_such_a_pipeline_is_not_loaded(tmp_path):
    content = json.loads(byte_tokenizer().to_str())
    content["normalizer"] = json.loads(normalizers.Sequence([GROWS] * 4).__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"tokenizer\.json: its normalizer can make a text 1e\+12 times as long"):
        load(tmp_path)
