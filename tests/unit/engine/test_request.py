"""What a request knows about itself."""

import pytest

from pagemill.engine.request import Request, RequestStatus
from tests.fakes.engine_setup import core_request


def make(prompt, max_model_len=100, **options):
    return Request(core_request("r", prompt, **options), sequence=0, max_model_len=max_model_len)


def test_emitted_tokens_follow_the_prompt_and_do_not_move_the_limit():
    request = make(5, emitted=[7, 8], max_tokens=6)
    assert request.token_ids.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert (request.num_prompt_tokens, request.num_tokens, request.length_limit) == (5, 7, 11)


def test_the_context_bounds_the_length():
    assert make(5, max_tokens=500).length_limit == 100
    assert make(5, max_tokens=None).length_limit == 100


@pytest.mark.parametrize("prompt", [[], [1] * 100])
def test_a_prompt_without_room_is_refused(prompt):
    with pytest.raises(ValueError, match=f"the prompt has {len(prompt)} tokens; 1 to 99 are allowed"):
        make(prompt)


def test_token_ids_are_32_bit():
    with pytest.raises(OverflowError):
        make([2**31])


def test_ends_are_told_from_states():
    ends = {status for status in RequestStatus if status.finished}
    assert ends == {status for status in RequestStatus if status.name.startswith("FINISHED")}
