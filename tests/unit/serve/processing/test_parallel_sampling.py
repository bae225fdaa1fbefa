"""One request for n completions as n engine requests."""

from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.processing.parallel_sampling import fan_out


def request(n: int, seed: int) -> EngineCoreRequest:
    params = SamplingParams(n=n, seed=seed)
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=[1, 2], params=params, arrival_time=1.0, priority=2, cache_salt="s"
    )


def test_one_completion_is_the_request_itself() -> None:
    only = request(1, 9)
    assert fan_out(only) == [only]


def test_children_differ_in_id_and_seed_only() -> None:
    children = fan_out(request(3, 2**64 - 2))
    assert [child.params.seed for child in children] == [2**64 - 2, 2**64 - 1, 0]
    assert len({child.request_id for child in children}) == 3
    assert {(child.params.n, child.priority, child.cache_salt) for child in children} == {(1, 2, "s")}
    assert all(child.prompt_token_ids is children[0].prompt_token_ids for child in children)
