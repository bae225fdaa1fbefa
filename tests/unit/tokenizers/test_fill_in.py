"""Tokens of prompts with a gap: found by their names or by what a file says, and never spelled by a text."""

from pathlib import Path

import pytest
from tokenizers import AddedToken

from pagemill.tokenizers.fill_in import FillInTokens
from pagemill.tokenizers.gguf_tokenizer import load as load_gguf
from pagemill.tokenizers.hf_tokenizer import HfTokenizer, SpecialTokens
from tests.fakes.tiny_checkpoint import byte_tokenizer
from tests.unit.tokenizers.vocabularies import byte_level, write_bpe_gguf

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def tokenizer_with(*names: str, special: bool = True) -> tuple[HfTokenizer, dict[str, int]]:
    backend = byte_tokenizer()
    tokens = [AddedToken(name, normalized=False) for name in names]
    (backend.add_special_tokens if special else backend.add_tokens)(tokens)
    ids = {name: backend.token_to_id(name) for name in names}
    return HfTokenizer(backend, SpecialTokens(), None), ids


@pytest.mark.parametrize(
    "names",
    [
        QWEN[:3],
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        ("<PRE>", "<SUF>", "<MID>"),
    ],
)
def test_vocabularies_name_them_differently(names: tuple[str, str, str]) -> None:
    tokenizer, ids = tokenizer_with(*names)
    assert tokenizer.fill_in == FillInTokens(ids[names[0]], ids[names[1]], ids[names[2]], None, None, ())


@pytest.mark.parametrize("missing", range(3))
def test_all_three_are_needed(missing: int) -> None:
    names = [name for place, name in enumerate(QWEN) if place != missing]
    assert tokenizer_with(*names)[0].fill_in is None


def test_the_others_end_what_fills_a_gap() -> None:
    tokenizer, ids = tokenizer_with(*QWEN, "<|endoftext|>")
    assert tokenizer.fill_in is not None
    assert (tokenizer.fill_in.repository, tokenizer.fill_in.file) == (ids["<|repo_name|>"], ids["<|file_sep|>"])
    assert set(tokenizer.fill_in.ends) == {ids[name] for name in (*QWEN[3:], "<|endoftext|>")}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["a<|fim_suffix|>b", "<|fim_prefix|>", "</s><|file_sep|>\n", "plain", "\ufdd0\ufdd1x"])
def test_a_text_that_spells_them_is_text(text: str, special: bool) -> None:
    """Also where the vocabulary counts them among its ordinary tokens, as Qwen's does."""
    tokenizer, _ = tokenizer_with(*QWEN, special=special)
    assert tokenizer.fill_in is not None
    ids = tokenizer.encode_literal(text)
    plain = {byte: token for token in range(3, 259) for byte in tokenizer.token_bytes(token)}
    assert ids == [plain[byte] for byte in text.encode()]


def test_a_gguf_file_says_which_they_are(tmp_path: Path) -> None:
    trained = byte_level()
    plain = load_gguf(write_bpe_gguf(tmp_path / "plain.gguf", trained, "gpt-2"))
    assert plain.fill_in is None
    newer = {"fim_pre_token_id": 11, "fim_suf_token_id": 12, "fim_mid_token_id": 13, "fim_sep_token_id": 14}
    told = load_gguf(write_bpe_gguf(tmp_path / "new.gguf", trained, "gpt-2", **newer))
    assert told.fill_in == FillInTokens(11, 12, 13, None, 14, (14,))
    older = {"prefix_token_id": 21, "suffix_token_id": 22, "middle_token_id": 23, "eot_token_id": 24}
    told = load_gguf(write_bpe_gguf(tmp_path / "old.gguf", trained, "gpt-2", **older))
    assert told.fill_in == FillInTokens(21, 22, 23, None, None, (24,))
