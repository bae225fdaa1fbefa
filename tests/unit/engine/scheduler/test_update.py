"""Why requests end, and what is reported."""

import numpy as np
import pytest

from pagemill.engine.request import Request
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.engine.scheduler.update import SlotTokens, apply_tokens, drafts_by_slot, note_known_logprobs, report
from pagemill.messages.engine_io import FinishReason
from pagemill.messages.logprobs import joined
from pagemill.messages.step import NO_TOKEN, KnownLogprobs, ModelRunnerOutput
from tests.fakes.engine_setup import core_request
from tests.fakes.fake_core import logprobs_of


def running(*requests, max_model_len=100):
    states = SlotStates(8, 32)
    for sequence, item in enumerate(requests):
        states.assign(Request(item, sequence=sequence, max_model_len=max_model_len), item.prompt_token_ids[-1])
    return states


def sample(states, *token_ids):
    """One token for each running slot: {slot: (reason, stop token)} of those that end."""
    slots = states.running
    _, ended = apply_tokens(states, SlotTokens(slots, np.array(token_ids)))
    return {int(slots[row]): (finish.reason, finish.stop_token_id) for row, finish in ended.items()}


def test_stop_ids_end_only_the_request_that_has_them():
    states = running(core_request("a", 3, stop_token_ids=[7, 8]), core_request("b", 3, stop_token_ids=[9]))
    assert sample(states, 9, 8) == {}
    assert sample(states, 8, 9) == {0: (FinishReason.STOP, 8), 1: (FinishReason.STOP, 9)}


@pytest.mark.parametrize("num_stop_ids", [8, 9, 1024])
def test_any_number_of_stop_ids(num_stop_ids):
    stop_ids = range(100, 100 + num_stop_ids)
    states = running(core_request("a", 3, stop_token_ids=stop_ids), core_request("b", 3))
    assert sample(states, 99, stop_ids[-1]) == {}
    assert sample(states, stop_ids[-1], 1) == {0: (FinishReason.STOP, stop_ids[-1])}


def test_max_tokens_counts_generated_tokens():
    states = running(core_request("a", 3, max_tokens=2))
    assert sample(states, 5) == {}
    assert sample(states, 5) == {0: (FinishReason.LENGTH, None)}


def test_emitted_tokens_count_as_generated():
    states = running(core_request("a", 3, emitted=[4, 4, 4], max_tokens=5, min_tokens=4, stop_token_ids=[7]))
    assert sample(states, 7) == {}
    assert sample(states, 7) == {0: (FinishReason.STOP, 7)}


def test_the_context_ends_requests_too():
    states = running(core_request("a", 3, max_tokens=50), max_model_len=5)
    assert sample(states, 5) == {}
    assert sample(states, 5) == {0: (FinishReason.LENGTH, None)}


def test_a_stop_id_as_the_last_token_is_a_stop():
    states = running(core_request("a", 3, max_tokens=1, stop_token_ids=[7]))
    assert sample(states, 7) == {0: (FinishReason.STOP, 7)}


def test_stop_ids_count_once_min_tokens_are_generated():
    states = running(core_request("a", 3, max_tokens=9, min_tokens=2, stop_token_ids=[7]))
    assert sample(states, 7) == {}
    assert sample(states, 7) == {}
    assert sample(states, 7) == {0: (FinishReason.STOP, 7)}


def test_a_steady_request_is_a_row_and_others_are_objects():
    states = running(*(core_request(name, 3, max_tokens=9, stop_token_ids=[7]) for name in "abc"))
    for slot in range(3):
        states.occupant(slot).num_cached_tokens = slot
    first = report(states, SlotTokens(states.running, np.array([1, 2, 3])), {})
    assert (first.request_ids, first.token_ids) == ([], [])
    assert [(output.request_id, output.new_token_ids, output.num_cached_tokens) for output in first.outputs] == [
        ("a", [1], 0),
        ("b", [2], 1),
        ("c", [3], 2),
    ]
    second = report(states, SlotTokens(states.running, np.array([4, 5, 6])), {})
    assert second == (["a", "b", "c"], [4, 5, 6], [])
    third = report(states, *apply_tokens(states, SlotTokens(states.running, np.array([8, 7, 9]))))
    assert (third.request_ids, third.token_ids) == (["a", "c"], [8, 9])
    assert [(output.request_id, output.new_token_ids, output.finish.stop_token_id) for output in third.outputs] == [
        ("b", [7], 7)
    ]


@pytest.mark.parametrize("num_stop_ids", [0, 1, 7, 8, 9, 300])
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_a_slot_without_a_token_ends_with_an_error(num_stop_ids, min_tokens):
    limits = {"stop_token_ids": range(100, 100 + num_stop_ids), "min_tokens": min_tokens, "max_tokens": 9}
    requests = [core_request(name, 3, **limits) for name in "abc"]
    states = running(*requests)
    slots = states.running
    new, finished = apply_tokens(states, SlotTokens(slots, np.array([5, NO_TOKEN, 6])))
    assert [(row, finish.reason) for row, finish in finished.items()] == [(1, FinishReason.ERROR)]
    assert "NaN" in finished[1].message
    outputs = report(states, new, finished).outputs
    assert [output.new_token_ids for output in outputs] == [[5], [], [6]]
    assert [states.flush(slot).token_ids[-1] for slot in slots.tolist()] == [5, requests[1].prompt_token_ids[-1], 6]


def test_each_prompt_logprob_is_noted_once_whatever_steps_were_in_flight_at_a_preemption():
    """A pipeline may admit a preempted request again while parts of its first run are still on their way; the second
    run's parts begin and end elsewhere."""
    request = Request(core_request("a", 13), sequence=0, max_model_len=100)
    parts = [(0, 4), (4, 8), (0, 6), (6, 12)]  # two steps of the first run, two of the second
    for start, end in parts:
        part = KnownLogprobs("a", 1 + start, logprobs_of(range(start, end), 1))
        note_known_logprobs({"a": request}, [part, KnownLogprobs("gone", 1, logprobs_of([1], 1))])
    assert joined(request.prompt_logprobs).token_ids[:, 0].tolist() == list(range(12))


def test_each_logprob_of_forced_tokens_is_noted_once_and_told_with_the_next_sampled_token():
    states = running(core_request("a", 3, max_tokens=9, logprobs=1))
    request = states.occupant(0)
    request.forced.unscored_from = 5
    for start, end in [(4, 5), (5, 7), (5, 6), (6, 9), (12, 13)]:
        note_known_logprobs({"a": request}, [KnownLogprobs("a", start, logprobs_of(range(start, end), 1))])
    assert request.forced.unscored_from == 9
    new = SlotTokens(states.running, np.array([5, 6, 7, 8, 20]), np.array([5]))
    (output,) = report(states, new, {}, {0: logprobs_of([20], 3)}).outputs
    assert output.logprobs.token_ids[:, 0].tolist() == output.new_token_ids == [5, 6, 7, 8, 20]
    assert not request.forced.logprobs


def test_prompt_logprobs_are_told_once_and_not_kept():
    states = running(core_request("a", 3, max_tokens=9, prompt_logprobs=1))
    request = states.occupant(0)
    note_known_logprobs({"a": request}, [KnownLogprobs("a", 1, logprobs_of([4, 5], 1))])
    for expected in ([4, 5], None):
        new, finished = apply_tokens(states, SlotTokens(states.running, np.array([7])))
        found = [item.prompt_logprobs for item in report(states, new, finished).outputs]
        assert [item.token_ids[:, 0].tolist() for item in found if item] == ([expected] if expected else [])
        assert not request.prompt_logprobs


def test_a_request_is_told_what_became_of_its_drafts():
    states = running(*(core_request(name, 3, max_tokens=9, stop_token_ids=[7]) for name in "abcd"))
    report(states, SlotTokens(states.running, np.array([1, 2, 3, 4])), {})
    slots = states.running
    counts = np.array([3, 1, 1, 4], np.int32)
    token_ids = np.array([11, 12, 13, 14, 15, 16, 7, 17, 18], np.int32)
    output = ModelRunnerOutput(1, slots, token_ids, counts=counts, verified=np.array([4, 2, 0, 3], np.int32))
    drafts = drafts_by_slot(slots, output)
    assert drafts == {0: (4, 2), 1: (2, 0), 3: (3, 3)}
    found = report(states, *apply_tokens(states, SlotTokens(slots, token_ids, counts)), drafts=drafts)
    assert (found.request_ids, found.token_ids) == (["c"], [15]), "nothing more to say"
    assert [(output.request_id, output.num_drafts, output.num_accepted) for output in found.outputs] == [
        ("a", 4, 2), ("b", 2, 0), ("d", 3, 2),  # the last one ended with its second token
    ]  # fmt: skip


def test_all_drafts_of_a_step_may_be_wrong():
    output = ModelRunnerOutput(1, np.array([4, 2], np.int32), np.array([1, 2]), verified=np.array([0, 3], np.int32))
    assert drafts_by_slot(np.array([4, 2]), output) == {2: (3, 0)}
