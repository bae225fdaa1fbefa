import numpy as np
import pytest

from pagemill.grammar.interface import GrammarTooComplexError, num_words
from tests.fakes.byte_vocabulary import TABLE, Following


def test_forced_tokens_are_told():
    matcher = Following("guidance").matcher(choice=["abc"])
    assert matcher.accept(list(b"ab")) == 2
    assert matcher.forced() == [ord("c")]


def test_what_outputs_begin_with_is_worked_out_once():
    """And is that of each output, alone and beside others, as long as it has no tokens."""
    first = Following("guidance").matcher(regex="ab(c|d)")
    others = [first.copy() for _ in range(3)]
    assert [matcher.forced() for matcher in (first, *others)] == [list(b"ab")] * 4
    first.forced().clear()
    assert first.forced() == list(b"ab")
    masks = np.zeros((4, num_words(len(TABLE.tokens))), np.int32)
    first.fill(masks[0])
    others[1].accept(list(b"ab"))
    assert others[1].forced() == []
    for parallel in (False, True):
        masks[1:] = 77
        assert others[0].batch(parallel)(others, masks[1:]) == [None] * 3
        tokens = [set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))) for mask in masks]
        assert tokens == [{ord("a")}, {ord("a")}, {ord("c"), ord("d")}, {ord("a")}]


def test_what_cannot_be_followed_says_so():
    matcher = Following("guidance").matcher(regex="x(a{1,300}){300}")
    mask = np.zeros(num_words(len(TABLE.tokens)), np.int32)
    with pytest.raises(GrammarTooComplexError):
        for token in list(b"x" + b"a" * 400):
            matcher.fill(mask)
            matcher.accept([token])


@pytest.mark.parametrize("form", [{"json": {"$ref": "#"}}, {"grammar": 'start: start "a"'}])
def test_what_only_leads_to_itself_is_named_so(form):
    matcher = Following("guidance").matcher(**form)
    with pytest.raises(GrammarTooComplexError, match=r"a \$ref, or a rule, leads to itself"):
        matcher.fill(np.zeros(num_words(len(TABLE.tokens)), np.int32))
