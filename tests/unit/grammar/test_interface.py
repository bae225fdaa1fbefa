"""What every grammar backend does."""

import numpy as np
import pytest

from pagemill.grammar.interface import num_words
from tests.fakes.byte_vocabulary import END, TABLE


def allowed(matcher):
    mask = np.zeros(num_words(len(TABLE.tokens)), np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_a_mask_has_a_bit_for_each_token_that_may_come(vocabulary):
    matcher = vocabulary.matcher(regex="a(b|c)?")
    assert allowed(matcher) == {ord("a")}
    matcher.accept([ord("a")])
    assert allowed(matcher) == {ord("b"), ord("c"), END}
    assert matcher.complete
    assert not matcher.ended
    matcher.accept([ord("b")])
    assert allowed(matcher) == {END}
    assert matcher.ended


def test_nothing_follows_the_token_that_ends_an_output(vocabulary):
    matcher = vocabulary.matcher(regex="a+")
    assert matcher.accept([ord("a"), END]) == 2
    assert matcher.ended
    assert matcher.copy().ended
    assert matcher.accept([ord("a")]) == 0


def test_what_may_not_come_is_not_taken(vocabulary):
    matcher = vocabulary.matcher(choice=["abc"])
    assert matcher.accept(list(b"abx")) == 2
    assert allowed(matcher) == {ord("c")}
    assert matcher.accept([END]) == 0
    assert matcher.accept([ord("c")]) == 1


def test_longer_tokens_are_allowed(vocabulary):
    matcher = vocabulary.matcher(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                                       "additionalProperties": False}, disable_any_whitespace=True)  # fmt: skip
    assert TABLE.tokens.index(b'{"') in allowed(matcher)
    assert matcher.accept([TABLE.tokens.index(b'{"'), ord("a"), TABLE.tokens.index(b'":')]) == 3
    assert allowed(matcher) == {ord("t"), ord("f"), TABLE.tokens.index(b"true")}


def test_copies_go_on_by_themselves(vocabulary):
    matcher = vocabulary.matcher(choice=["ab", "ac"])
    copy = matcher.copy()
    copy.accept(list(b"ab"))
    assert copy.ended
    assert copy.num_bytes == matcher.num_bytes > 0
    assert matcher.accept(list(b"ac")) == 2


def test_drafts_are_counted_without_going_on(vocabulary):
    matcher = vocabulary.matcher(choice=["abc"])
    assert matcher.count_allowed(list(b"abd")) == 2
    assert matcher.accept(list(b"abc")) == 3


def test_forced_tokens_are_the_only_ones(vocabulary):
    matcher = vocabulary.matcher(choice=["abc", "abd"])
    for token in matcher.forced():
        assert allowed(matcher) == {token}
        assert matcher.accept([token]) == 1


def test_a_mask_must_be_contiguous(vocabulary):
    with pytest.raises(ValueError, match="contiguous"):
        vocabulary.matcher(choice=["a"]).fill(np.zeros(2 * num_words(len(TABLE.tokens)), np.int32)[::2])


def test_what_is_no_grammar_is_an_error(vocabulary):
    with pytest.raises(ValueError):
        vocabulary.matcher(grammar="root ::= nowhere")
