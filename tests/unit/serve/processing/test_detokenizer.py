"""Text of one completion: whole characters, stop strings over token borders, min_tokens."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.processing.detokenizer import NoText, PlainText, StopMatch, StoppingText, make_detokenizer
from tests.fakes.fake_tokenizer import EOS, ByteTokenizer

TOKENIZER = ByteTokenizer()


def text_of(pieces: list[list[int]], params: SamplingParams) -> tuple[str, StopMatch | None]:
    """Feed batches of tokens, taking text after each."""
    detokenizer, text = make_detokenizer(TOKENIZER, [], params), ""
    for piece in pieces:
        match = detokenizer.append(piece)
        text += detokenizer.take()
        if match is not None:
            return text, match
    match = detokenizer.finish()
    return text + detokenizer.take(), match


@pytest.mark.slow
@given(st.text(alphabet="aé😀b", max_size=12), st.sampled_from(["ab", "é", "😀b", "zz"]), st.booleans(), st.data())
def test_every_split_into_tokens_gives_the_same_text(text: str, stop: str, include: bool, data: st.DataObject) -> None:
    ids = list(text.encode())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    borders = [0, *cuts, len(ids)]
    pieces = [ids[a:b] for a, b in itertools.pairwise(borders)]
    found, match = text_of(pieces, SamplingParams(stop=stop, include_stop_str_in_output=include))
    before, separator, _ = text.partition(stop)
    assert found == before + (separator if include else "")
    assert (match is not None) == bool(separator)


@given(st.text(max_size=20))
def test_no_piece_holds_half_a_character(text: str) -> None:
    detokenizer, pieces = make_detokenizer(TOKENIZER, [], SamplingParams()), []
    for token in text.encode():
        detokenizer.append([token])
        pieces.append(detokenizer.take())
    detokenizer.finish()
    pieces.append(detokenizer.take())
    assert [piece for piece in pieces if piece] == list(text)


def test_half_a_character_at_the_end_is_replaced() -> None:
    assert text_of([[0x61, 0xF0, 0x9F]], SamplingParams())[0] == "a\N{REPLACEMENT CHARACTER}"


def test_number_of_tokens_up_to_the_stop_string_is_known() -> None:
    detokenizer = make_detokenizer(TOKENIZER, [], SamplingParams(stop=["lo"]))
    assert detokenizer.append(list(b"hello you")) == StopMatch("lo", 5)
    assert detokenizer.take() == "hel"


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")])
def test_stop_strings_do_not_match_before_min_tokens(min_tokens: int, expected: str) -> None:
    params = SamplingParams(stop=["."], min_tokens=min_tokens)
    assert text_of([[token] for token in b"a.b.c"], params)[0] == expected


def test_a_partial_stop_string_at_the_end_is_text() -> None:
    assert text_of([list(b"the EN")], SamplingParams(stop=["END"])) == ("the EN", None)


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    assert text_of([[*b"hi", EOS]], SamplingParams())[0] == "hi"
    assert text_of([[*b"hi", EOS]], SamplingParams(skip_special_tokens=False))[0] == "hi</s>"


def test_the_cheapest_kind_is_chosen() -> None:
    assert isinstance(make_detokenizer(TOKENIZER, [], SamplingParams(detokenize=False)), NoText)
    assert isinstance(make_detokenizer(TOKENIZER, [], SamplingParams()), PlainText)
    assert isinstance(make_detokenizer(TOKENIZER, [], SamplingParams(stop="x")), StoppingText)
