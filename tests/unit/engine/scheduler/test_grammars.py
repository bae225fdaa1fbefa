import numpy as np
import pytest

from pagemill.engine.request import Request
from pagemill.engine.scheduler.grammars import begin_output, follow_grammars
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.engine.scheduler.update import SlotTokens
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


class Held:
    """A grammar that forces the same tokens until it is told to have them sampled."""

    def __init__(self, forced):
        self.forced = forced
        self.held = []

    def accept(self, token_ids):
        self.accepted = list(token_ids)

    def end(self):
        return None

    def is_complete_with(self, token_ids):
        return False

    def forced_tokens(self):
        found, self.forced = self.forced, []
        return found

    def hold(self, token_ids):
        self.held = list(token_ids)
        return True


@pytest.mark.parametrize(
    ("forced", "in_flight", "params", "limits", "held"),
    [
        ([7], 1, {}, {}, True),
        ([7], 1, {"stop_token_ids": [8], "min_tokens": 3}, {}, True),
        ([7, 8], 1, {}, {}, False),
        ([7], 0, {}, {}, False),
        ([7], 1, {"stop_token_ids": [7], "min_tokens": 3}, {}, False),
        ([7], 1, {}, {"holds_forced": False}, False),
    ],
)
def test_a_single_token_whose_step_is_in_flight_is_left_to_its_mask(forced, in_flight, params, limits, held):
    """To append it would save no step: the sample in flight would be void, and the next step begin where it does."""
    grammar = Held(forced)
    states = SlotStates(2, 8)
    request = Request(core_request("a", 3, **params), sequence=0, max_model_len=100, grammar=grammar)
    slot = states.assign(request, 3)
    states.append(np.array([slot]), np.array([5]))
    states.num_expected[slot] = 4 + in_flight
    epoch = states.epoch[slot]
    limits = SchedulerLimits(64, 4, 100, **({"holds_forced": True} | limits))
    new, known = follow_grammars(states, SlotTokens(np.array([slot]), np.array([5])), {}, None, limits)
    assert grammar.held == (forced if held else [])
    assert [part.token_ids.tolist() for part in known] == ([] if held else [forced])
    assert new.token_ids.tolist() == ([5] if held else [5, *forced])
    assert states.num_known[slot] == len(new.token_ids) + 3
    assert states.epoch[slot] == epoch + (not held)
