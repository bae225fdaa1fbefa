import numpy as np
import pytest

from pagemill.engine.structured_output.following import FollowedGrammar
from pagemill.grammar.interface import num_words
from pagemill.grammar.mask_filler import MaskFiller
from pagemill.messages.engine_io import FinishReason
from pagemill.messages.structured_outputs import FreeTokens
from tests.fakes.byte_vocabulary import END, TABLE, Following


@pytest.fixture(scope="module")
def vocabulary():
    return Following()


def followed(vocabulary, free=None, **form):
    matcher = vocabulary.matcher(**form)
    return FollowedGrammar(matcher, num_words(len(TABLE.tokens)), TABLE.ends, free)


def allowed(grammar):
    return allowed_of([grammar])[0]


def allowed_of(grammars):
    masks = np.full((len(grammars), grammars[0].num_words), 77, np.int32)
    FollowedGrammar.fill(grammars, masks, MaskFiller())
    return [set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()) for mask in masks]


def test_an_output_ends_where_nothing_may_follow(vocabulary):
    grammar = followed(vocabulary, choice=["ab", "ac"])
    grammar.accept([ord("a")])
    assert grammar.end() is None
    assert allowed(grammar) == {ord("b"), ord("c")}
    grammar.accept([ord("c")])
    assert grammar.end().reason is FinishReason.STOP


def test_an_output_that_may_go_on_ends_with_its_token(vocabulary):
    grammar = followed(vocabulary, regex="a+")
    grammar.accept([ord("a")])
    assert grammar.end() is None
    assert allowed(grammar) == {ord("a"), END}


def test_forced_tokens_are_told(vocabulary):
    assert followed(vocabulary, choice=["xyz", "xyw"]).forced_tokens() == list(b"xy")


def test_free_until_tokens_have_come(vocabulary):
    grammar = followed(vocabulary, free=FreeTokens((((7, 8),),)), choice=["ab"])
    grammar.accept([7, 7])
    assert not grammar.holds
    assert grammar.forced_tokens() == ()
    grammar.accept([8, ord("a")])
    assert grammar.holds
    assert allowed(grammar) == {ord("b")}


def test_free_until_one_of_several_ends_of_each_step(vocabulary):
    grammar = followed(vocabulary, free=FreeTokens((((7, 8), (9,)), ((5,),))), choice=["ab"])
    grammar.accept([5, 7, 5, 9])
    assert not grammar.holds
    grammar.accept([7, 8, 5])
    assert grammar.forced_tokens() == list(b"ab")


def test_reasoning_that_may_be_left_out(vocabulary):
    """The token that begins it is allowed at first, beside the form; nothing is forced there."""
    grammar = followed(vocabulary, free=FreeTokens((((7,),),), begin=3), choice=["ab"])
    assert grammar.holds
    assert grammar.forced_tokens() == ()
    assert allowed(grammar) == {3, ord("a")}
    grammar.accept([3])
    assert not grammar.holds
    assert grammar.forced_tokens() == ()
    grammar.accept([ord("x"), 3, 7])
    assert allowed(grammar) == {ord("a")}
    assert grammar.forced_tokens() == list(b"ab")


def test_reasoning_that_was_left_out(vocabulary):
    grammar = followed(vocabulary, free=FreeTokens((((7,),),), begin=3), choice=["ab", "ac"])
    grammar.accept([ord("a")])
    assert allowed(grammar) == {ord("b"), ord("c")}
    grammar.accept([ord("c")])
    assert grammar.end().reason is FinishReason.STOP


def test_what_cannot_be_followed_ends_with_an_error_and_nothing_else_does(vocabulary):
    grammar = followed(vocabulary, regex="x(a{1,300}){300}")
    for token in list(b"x" + b"a" * 400):
        allowed(grammar)
        grammar.accept([token])
    assert grammar.end().reason is FinishReason.ERROR
    assert allowed(grammar) == {END}


def test_a_token_that_is_not_allowed_is_an_error(vocabulary):
    grammar = followed(vocabulary, choice=["ab"])
    grammar.accept([ord("x")])
    assert "token" in grammar.end().message


def test_whether_nothing_may_follow_forced_tokens(vocabulary):
    grammar = followed(vocabulary, regex="xy(a?)z")
    assert not grammar.is_complete_with(list(b"xy"))
    grammar.accept(list(b"xya"))
    assert grammar.forced_tokens() == list(b"z")
    assert grammar.is_complete_with(list(b"z"))
    assert grammar.forced_tokens() == list(b"z"), "nothing was accepted"


def test_the_name_of_a_control_token_is_forced_as_text(vocabulary):
    grammar = followed(vocabulary, choice=["x<end>y"])
    assert grammar.forced_tokens() == list(b"x<end>y")
    grammar.accept(grammar.forced_tokens())
    assert grammar.end().reason is FinishReason.STOP


def test_outputs_that_can_be_followed_have_their_masks_beside_those_that_cannot(vocabulary):
    """One has failed before, one fails with this mask."""
    failed = followed(vocabulary, choice=["ab"])
    failed.accept([ord("x")])
    grammars = [followed(vocabulary, choice=["ab"]), failed, followed(vocabulary, regex="[0-9]")]
    digits = set(range(ord("0"), ord("9") + 1))
    assert allowed_of(grammars) == [{ord("a")}, {END}, digits]
    assert [grammar.end() is None for grammar in grammars] == [True, False, True]


def ahead_of(grammar):
    masks = np.full((grammar.num_ahead, grammar.num_words), 77, np.int32)
    FollowedGrammar.fill_ahead([grammar], masks, MaskFiller())
    return [set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()) for mask in masks]


def test_drafts_are_allowed_up_to_where_they_leave_the_form(vocabulary):
    grammar = followed(vocabulary, regex="[ab][bc][cd][de]")
    assert grammar.count_allowed(list(b"abx"), forces=True) == 2
    assert ahead_of(grammar) == [set(b"bc"), set(b"cd")]
    assert allowed(grammar) == set(b"ab")
    assert grammar.count_allowed(list(b"x"), forces=True) == grammar.num_ahead == 0
    grammar.count_allowed(list(b"ab"), forces=True)
    grammar.accept([ord("a")])
    assert grammar.num_ahead == 0


def test_drafts_go_no_further_than_the_output_or_what_is_sampled(vocabulary):
    assert followed(vocabulary, regex="[ab][bc][cd]").count_allowed(list(b"abc"), forces=True) == 2
    forced = {"choice": ["abcx", "abcy", "adcx"]}
    assert followed(vocabulary, **forced).count_allowed(list(b"abcx"), forces=True) == 1
    assert followed(vocabulary, **forced).count_allowed(list(b"abcx"), forces=False) == 3
    free = followed(vocabulary, free=FreeTokens((((7,),),)), choice=["ab"])
    assert free.count_allowed([1, 2], forces=True) == 0


def test_a_forced_token_that_is_held_is_all_that_may_come(vocabulary):
    """Also beside others in the same call, and no longer than until it has come."""
    held, other = (followed(vocabulary, regex="xy(a|b)c") for _ in range(2))
    assert held.hold(held.forced_tokens())
    assert held.forced_tokens() == ()
    assert held.count_allowed(list(b"xy"), forces=True) == 0
    assert allowed_of([held, other]) == [{ord("x")}, {ord("x")}]
    held.accept([ord("x")])
    assert allowed(held) == {ord("y")}
    held.accept([ord("y")])
    assert allowed(held) == {ord("a"), ord("b")}
    held.accept([ord("b")])
    assert held.forced_tokens() == [ord("c")]


def test_nothing_is_held_before_a_form_has_begun(vocabulary):
    grammar = followed(vocabulary, free=FreeTokens((((7, 8),),)), choice=["ab"])
    assert not grammar.hold([ord("a")])
    assert grammar.forced_tokens() == ()
