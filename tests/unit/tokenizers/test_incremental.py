import time
from random import Random

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from pagemill.tokenizers.hf_tokenizer import HfTokenizer, SpecialTokens
from pagemill.tokenizers.incremental import PieceDecoder, WindowDecoder
from pagemill.tokenizers.load import load_tokenizer
from pagemill.tokenizers.pieces import PieceTable, piece_rule
from tests.unit.tokenizers.vocabularies import (
    CONTROL,
    TEXTS,
    byte_level,
    sentencepiece_bpe,
    write_spm_gguf,
)

pytestmark = pytest.mark.cases(one_in=4)

REPLACEMENT = "\ufffd"
RARE = "\U0001d539"  # four tokens, one per byte


@pytest.fixture(scope="module")
def bpe():
    return HfTokenizer(byte_level(), SpecialTokens(), None)


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    """A tokenizer that drops the first space of a text."""
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    return load_tokenizer(write_spm_gguf(path, sentencepiece_bpe(add_dummy_prefix=True, symbols=())))


@pytest.fixture(scope="module", params=["bpe", "spm"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def streamed(tokenizer, prompt, output, skip=True):
    decoder = tokenizer.incremental(prompt, skip)
    return [decoder.step([token]) for token in output] + [decoder.flush()]


def shown_by_prompt(tokenizer, prompt, output, skip):
    """The text of a prompt, without a character at its end that it begins and the output completes."""
    complete = tokenizer.incremental([], skip).step(prompt)
    follows = tokenizer.decode(prompt + output, skip)[len(complete) :]
    return complete if follows and not follows.startswith(REPLACEMENT) else tokenizer.decode(prompt, skip)


ids = st.lists(st.integers(0, 420), max_size=24)


@given(ids, ids, st.booleans(), st.randoms())
@example([240, 163], [], False, Random(0)).via("ED A0, which begins nothing")
@example([240, 163], [131, 68], False, Random(0)).via("and goes on")
def test_pieces_of_any_tokens_add_up(tokenizer, prompt, output, skip, random):
    whole = tokenizer.decode(prompt + output, skip)
    before = shown_by_prompt(tokenizer, prompt, output, skip)
    assert before + "".join(streamed(tokenizer, prompt, output, skip)) == whole
    decoder, text, rest = tokenizer.incremental(prompt, skip), "", list(output)
    while rest:
        size = random.randint(0, len(rest))
        text, rest = text + decoder.step(rest[:size]), rest[size:]
    assert before + text + decoder.flush() == whole


@pytest.mark.slow
@given(st.text(max_size=30), st.integers(0, 60))
def test_text_streams_without_a_broken_character(tokenizer, text, cut):
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, ids[:cut], ids[cut:])
    assert "".join(pieces).count(REPLACEMENT) <= text.count(REPLACEMENT)
    if cut == 0:
        assert "".join(pieces) == text


@pytest.mark.parametrize("text", TEXTS)
def test_known_texts_stream(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(streamed(tokenizer, [], ids, skip=False)) == text


@given(ids, st.booleans())
def test_byte_level_decode_equals_the_library(bpe, ids, skip):
    assert bpe.decode(ids, skip) == bpe._backend.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
def test_byte_fallback_decode_equals_the_library(spm, text):
    ids = spm.encode(text)
    assert spm.decode(ids) == spm._backend.decode(ids, skip_special_tokens=True)


def test_an_emoji_over_several_tokens_appears_at_once(bpe):
    ids = bpe.encode(RARE, add_special_tokens=False)
    assert len(ids) == 4
    assert streamed(bpe, [], ids) == ["", "", "", RARE, ""]


def test_bytes_that_are_no_character_become_one_replacement_each(bpe):
    lead, other = bpe.encode(RARE)[0], bpe.encode("x")[0]
    assert streamed(bpe, [], [lead, other]) == ["", f"{REPLACEMENT}x", ""]
    assert streamed(bpe, [], [lead]) == ["", REPLACEMENT]


def test_a_character_that_the_prompt_began(bpe):
    ids = bpe.encode(f"x{RARE}y", add_special_tokens=False)
    assert streamed(bpe, ids[:3], ids[3:]) == ["", RARE, "y", ""]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_that_the_prompt_began_and_nobody_completes_is_the_prompts(bpe, num_bytes):
    begun = bpe.encode(f"x{RARE}", add_special_tokens=False)[: 1 + num_bytes]
    assert streamed(bpe, begun, bpe.encode("{y", add_special_tokens=False)) == ["{", "y", ""]
    assert streamed(bpe, begun, bpe.encode(RARE, add_special_tokens=False)) == ["", "", "", RARE, ""]
    assert streamed(bpe, begun, []) == [""]
    assert bpe.incremental(begun).step(bpe.encode("{y", add_special_tokens=False)) == "{y"


def test_a_character_that_only_seems_to_be_completed(bpe):
    """Its bytes, the output's too, are one U+FFFD, which the prompt has shown."""
    begun = bpe.encode(RARE, add_special_tokens=False)
    assert streamed(bpe, begun[:2], [begun[2], *bpe.encode("x")]) == ["", "x", ""]
    assert streamed(bpe, begun[:2], [begun[2]]) == ["", ""]


def test_a_replacement_character_that_prompt_and_output_make_together(bpe):
    begun = bpe.encode(REPLACEMENT, add_special_tokens=False)
    assert len(begun) == 3
    assert "".join(streamed(bpe, begun[:1], begun[1:])) == REPLACEMENT


def test_leading_space_right_after_a_prompt(spm):
    hello = spm.encode("Hello", add_special_tokens=False)
    assert "".join(streamed(spm, [], hello)) == "Hello"
    assert "".join(streamed(spm, [spm.bos_token_id], hello)) == "Hello"
    assert "".join(streamed(spm, hello, hello)) == " Hello"
    assert "".join(streamed(spm, [spm.bos_token_id], hello, skip=False)) == " Hello"


def test_special_tokens_are_skipped_or_shown(bpe):
    ids = bpe.encode(f"a{CONTROL}b")
    assert "".join(streamed(bpe, [], ids)) == "ab"
    assert "".join(streamed(bpe, [], ids, skip=False)) == f"a{CONTROL}b"


def test_ids_without_a_token_show_nothing(bpe):
    beyond = bpe.vocab_size + 5
    assert bpe.decode([beyond, *bpe.encode("x"), beyond]) == "x"


def test_a_step_costs_the_same_after_any_number_of_tokens(bpe):
    ids = bpe.encode("some words ", add_special_tokens=False)
    decoder = bpe.incremental(ids * 2000)

    def seconds():
        start = time.perf_counter()
        for token in ids * 200:
            decoder.step((token,))
        return time.perf_counter() - start

    first = min(seconds() for _ in range(3))
    decoder.step(ids * 20_000)
    assert min(seconds() for _ in range(3)) < 5 * first


def test_rules_are_found_for_the_decoders_that_work_token_by_token():
    def rule(decoder):
        pipeline = tokenizers.Tokenizer(models.BPE())
        pipeline.decoder = decoder
        return piece_rule(pipeline)

    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    assert rule(decoders.ByteLevel()).strips_first_space is False
    assert rule(decoders.Sequence(steps)).strips_first_space is False
    assert rule(decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])).strips_first_space is True
    assert rule(decoders.Sequence([*steps, decoders.Strip(" ", 0, 1)])) is None
    assert rule(decoders.Sequence([decoders.Replace("_", " "), *steps[1:]])) is None
    assert rule(decoders.WordPiece()) is None
    assert piece_rule(tokenizers.Tokenizer(models.BPE())) is None


def test_pieces_are_looked_up_once():
    seen = []
    table = PieceTable(lambda i: seen.append(i) or "x", str.encode)
    decoder = PieceDecoder(table, (), False)
    assert decoder.step([1, 1, 2, 1]) == "xxxx"
    assert seen == [1, 2]


def other_tokenizer(decoder, words):
    pipeline = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.decoder = decoder
    return HfTokenizer(pipeline, SpecialTokens(), None)


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 10))
def test_other_decoders_go_through_a_window(output, cut):
    words = ["▁the", "▁qu", "ick", "日本", "▁"]
    metaspace = other_tokenizer(decoders.Metaspace(), words)
    assert isinstance(metaspace.incremental([]), WindowDecoder)
    prompt, rest = output[:cut], output[cut:]
    assert metaspace.decode(prompt) + "".join(streamed(metaspace, prompt, rest)) == metaspace.decode(output)


def test_word_pieces(bpe):
    pieces = other_tokenizer(decoders.WordPiece(cleanup=False), ["un", "##believ", "##able", "story", "."])
    ids = [0, 1, 2, 3] * 10
    assert "".join(streamed(pieces, [], ids)) == pieces.decode(ids)


def test_a_window_leaves_the_prompt_what_it_shows_of_a_character():
    def text(ids):
        return bytes(ids).decode(errors="replace")

    begun = list("x\U0001d539".encode())
    for num_bytes in (2, 3, 4):
        decoder = WindowDecoder(text, begun[:num_bytes])
        assert decoder.step(b"{y") + decoder.flush() == "{y"
        decoder = WindowDecoder(text, begun[:num_bytes])
        assert decoder.step(begun[num_bytes:]) + decoder.flush() == RARE
        assert WindowDecoder(text, begun[:num_bytes]).flush() == ""


def test_a_window_does_not_wait_for_ever():
    decoder = WindowDecoder(lambda ids: "".join(chr(i) for i in ids))
    text = "".join(decoder.step([0xFFFD]) for _ in range(100)) + decoder.flush()
    assert text == REPLACEMENT * 100
