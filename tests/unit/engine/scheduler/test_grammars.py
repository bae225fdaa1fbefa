import pytest

from pagemill.engine.request import Request
from pagemill.engine.scheduler.grammars import begin_output
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.structured_output.following import FollowedGrammar
from pagemill.grammar.interface import num_words
from pagemill.messages.engine_io import Finish, FinishReason
from tests.fakes.byte_vocabulary import TABLE, Following
from tests.fakes.engine_setup import core_request

LIMITS = SchedulerLimits(64, 4, 100)


@pytest.fixture(scope="module")
def vocabulary():
    return Following()


def begun(vocabulary, choice, limits=LIMITS, **params):
    """What a request's output begins with, and why it ends with that."""
    matcher = vocabulary.matcher(choice=choice)
    grammar = FollowedGrammar(matcher, num_words(len(TABLE.tokens)), TABLE.ends)
    request = Request(core_request("a", 3, **params), sequence=0, max_model_len=100, grammar=grammar)
    finish = begin_output(request, limits)
    assert list(request.token_ids[3:]) == request.forced.token_ids
    scored = bool(request.forced.token_ids) and request.scores_output
    assert request.forced.unscored_from == (3 if scored else None)
    return bytes(request.forced.token_ids), finish


def test_an_output_without_a_choice_is_complete_at_once(vocabulary):
    """Also where it has fewer tokens than asked for: nothing may follow."""
    assert begun(vocabulary, ["xyz"], max_tokens=9, min_tokens=7) == (b"xyz", Finish(FinishReason.STOP))
    assert begun(vocabulary, ["xyz"], max_tokens=2) == (b"xy", Finish(FinishReason.LENGTH))
    assert begun(vocabulary, ["xya", "xyb"], max_tokens=9) == (b"xy", None)


@pytest.mark.parametrize("params", [{"max_tokens": 0}, {"prompt_logprobs": 1, "max_tokens": 2}])
def test_nothing_is_forced_before_a_prompt_is_computed_that_somebody_asks_about(vocabulary, params):
    assert begun(vocabulary, ["xyz"], **params) == (b"", None)


def test_one_that_wants_log_probabilities_samples_its_last_token(vocabulary):
    """With which those of the forced ones come."""
    assert begun(vocabulary, ["xyz"], max_tokens=9, logprobs=0) == (b"xy", None)
    assert begun(vocabulary, ["xyz"], max_tokens=2, logprob_token_ids=[7]) == (b"x", None)
    assert begun(vocabulary, ["xya", "xyb"], max_tokens=9, logprobs=2) == (b"xy", None)
    assert begun(vocabulary, ["x"], max_tokens=9, logprobs=2) == (b"", None)


@pytest.mark.parametrize(
    ("limits", "params"),
    [
        ({"jump_forward": False}, {}),
        ({"scores_forced": False}, {"logprobs": 0}),
        ({}, {"bad_words_token_ids": [[7]]}),
    ],
)
def test_nothing_is_forced_where_tokens_are_to_be_sampled(vocabulary, limits, params):
    assert begun(vocabulary, ["xyz"], SchedulerLimits(64, 4, 100, **limits), **params) == (b"", None)
