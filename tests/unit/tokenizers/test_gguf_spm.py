import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.artifacts.gguf_file import read_gguf
from pagemill.errors import ModelError
from pagemill.tokenizers.gguf_spm import merges_from_scores
from pagemill.tokenizers.gguf_vocab import GgufVocab, read_vocab
from pagemill.tokenizers.load import load_tokenizer
from tests.unit.artifacts.gguf_builder import write_gguf
from tests.unit.tokenizers.vocabularies import TEXTS, sentencepiece_bpe, write_spm_gguf


@pytest.fixture(scope="module", params=[False, True], ids=["gemma-like", "llama-like"])
def pair(request, tmp_path_factory):
    """SentencePiece itself and our tokenizer of the same model, without and with a space put in front."""
    model = sentencepiece_bpe(add_dummy_prefix=request.param)
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    ours = load_tokenizer(write_spm_gguf(path, model, add_space_prefix=request.param, add_bos_token=False))
    return model, ours


def test_equals_sentencepiece(pair):
    model, ours = pair
    for text in TEXTS:
        if "<|ui|>" not in text and "\n" not in text:
            assert ours.encode(text) == model.encode(text), text


def test_user_defined_symbols_equal_sentencepiece(tmp_path):
    model = sentencepiece_bpe(add_dummy_prefix=False)
    ours = load_tokenizer(write_spm_gguf(tmp_path / "m.gguf", model, add_space_prefix=False, add_bos_token=False))
    for text in TEXTS:
        assert ours.encode(text) == model.encode(text), text


def test_with_a_prefix_text_after_a_symbol_gets_one_too(tmp_path):
    """As llama.cpp does for these files; SentencePiece puts the space at the start of the whole text only."""
    model = sentencepiece_bpe(add_dummy_prefix=True)
    ours = load_tokenizer(write_spm_gguf(tmp_path / "m.gguf", model, add_bos_token=False))
    assert ours.encode("a\nb") == [*model.encode("a"), model.piece_to_id("\n"), *model.encode("b")]


@given(st.text(alphabet=st.sampled_from("abcdefgh The12 .,日本🙂éx"), max_size=40))
def test_equals_sentencepiece_on_any_text(pair, text):
    model, ours = pair
    assert ours.encode(text) == model.encode(text)
    assert ours.decode(ours.encode(text)) == text


def test_bos_is_the_default_and_scores_are_needed(tmp_path):
    model = sentencepiece_bpe(add_dummy_prefix=True)
    ours = load_tokenizer(write_spm_gguf(tmp_path / "m.gguf", model))
    assert ours.encode("a") == [model.bos_id(), *model.encode("a")]
    assert ours.decode(ours.encode("a")) == "a"

    def keys(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a"])

    with pytest.raises(ModelError, match=r"no key tokenizer.ggml.scores"):
        load_tokenizer(write_gguf(tmp_path / "n.gguf", keys=keys))


def test_merges_of_the_file_stand_for_scores(tmp_path):
    """Gemma 4's kind: the same pieces, whose merges the file has."""
    model = sentencepiece_bpe(add_dummy_prefix=False)
    with_scores = read_gguf(write_spm_gguf(tmp_path / "scores.gguf", model, add_space_prefix=False))
    vocab = read_vocab(with_scores)
    merges = merges_from_scores(vocab, with_scores.metadata["tokenizer.ggml.scores"])

    def keys(writer):
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(vocab.tokens)
        writer.add_token_types(vocab.kinds.tolist())
        writer.add_token_merges([f"{left} {right}" for left, right in merges])
        writer.add_add_bos_token(True)
        writer.add_bos_token_id(model.bos_id())

    ours = load_tokenizer(write_gguf(tmp_path / "m.gguf", keys=keys))
    for text in TEXTS:
        assert ours.encode(text) == [model.bos_id(), *model.encode(text)], text
        assert ours.decode(ours.encode(text)[1:]) == text


def all_cuts(tokens, scores):
    """The definition, in plain Python."""
    order = sorted(range(len(tokens)), key=lambda i: (-scores[i], i))
    cuts = [(tokens[i], k) for i in order for k in range(1, len(tokens[i]))]
    return [(token[:k], token[k:]) for token, k in cuts if token[:k] in tokens and token[k:] in tokens]


@given(st.lists(st.text(alphabet="ab▁日🙂", min_size=1, max_size=6), unique=True, max_size=40), st.randoms())
def test_merges_are_all_cuts_by_score(tokens, random):
    scores = [random.choice([0.0, -1.0, -2.0, -3.5]) for _ in tokens]
    vocab = GgufVocab(tokens, np.ones(len(tokens), np.int32))
    assert merges_from_scores(vocab, np.array(scores, np.float32)) == all_cuts(tokens, scores)


def test_only_ordinary_tokens_are_merged():
    vocab = GgufVocab(["a", "b", "ab", "<s>", "abab"], np.array([1, 1, 4, 3, 1]))
    assert merges_from_scores(vocab, np.zeros(5, np.float32)) == []


def test_kind_of_tokenizer_that_is_not_supported(tmp_path):
    def keys(writer):
        writer.add_tokenizer_model("t5")
        writer.add_token_list(["a"])

    with pytest.raises(
        ModelError, match=r"tokenizer.ggml.model='t5' is not supported; supported: bert, gemma4, gpt2, llama"
    ):
        load_tokenizer(write_gguf(tmp_path / "n.gguf", keys=keys))


def test_numbers_of_tokens_and_types_must_agree(tmp_path):
    def keys(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([0.0, 0.0])
        writer.add_token_types([1])

    with pytest.raises(ModelError, match="2 tokens, but 1 token types"):
        load_tokenizer(write_gguf(tmp_path / "n.gguf", keys=keys))
