"""Copied tokens in the scheduler: counted as cached, in whichever step and depth, and none of them twice."""

import pytest

from pagemill.messages.block_copies import BlockCopy
from tests.fakes.engine_setup import Client, core_request, full, make_core, sliding
from tests.fakes.scripted_worker import alone
from tests.fakes.step_payloads import copies_of

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def engine(specs=None, **settings):
    core, worker = make_core(specs, partial=True, **settings)
    return Client(core), worker


def check(client, worker, *requests):
    """All are done, and got what they get alone."""
    client.run()
    for request in requests:
        assert client.tokens[request.request_id] == alone(request, worker.group_specs, worker.vocab_size, 64)


def test_copied_tokens_count_as_cached_and_are_not_computed():
    client, worker = engine()
    first, second = core_request("a", TOKENS), core_request("b", [*TOKENS[:11], 0, 0])
    client.add(first)
    client.step()
    client.add(second)
    client.step()
    step = worker.steps[-1]
    [new] = step.new
    assert new.num_computed_tokens == 11
    assert step.num_tokens.tolist() == [1, 2]
    assert copies_of(step) == [BlockCopy(3, new.block_ids[0][2])]
    check(client, worker, first, second)
    assert client.cached == {"a": 0, "b": 11}
    assert (client.stats.prefix_cache_queries, client.stats.prefix_cache_hits) == (27, 11)
    assert [len(copies_of(step)) for step in worker.steps].count(1) == 1


def test_requests_of_one_step_do_not_copy_from_each_other():
    client, worker = engine()
    requests = [core_request(name, [*TOKENS[:11], index]) for index, name in enumerate("ab")]
    client.add(*requests)
    client.step()
    assert copies_of(worker.steps[0]) == []
    assert client.cached == {"a": 0, "b": 8}
    check(client, worker, *requests)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_conversation_goes_on_where_it_ended(depth):
    client, worker = engine(depth=depth)
    said, cached = TOKENS[:9], 0
    for turn in range(3):
        request = core_request(f"turn {turn}", said, max_tokens=6)
        client.add(request)
        check(client, worker, request)
        assert client.cached[request.request_id] == cached
        said = [*said, *client.tokens[request.request_id]]
        cached = len(said) - 1  # the token sampled last was never computed
        said += [12, 12]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_leaves_what_it_computed(depth):
    client, worker = engine(depth=depth, budget=6)
    client.add(core_request("a", TOKENS))
    for _ in range(depth):
        client.core.step()
    client.core.abort(["a"])
    follow_up = core_request("b", TOKENS)
    client.add(follow_up)
    check(client, worker, follow_up)
    assert client.cached["b"] == 6 * depth


def test_what_a_preempted_request_held_is_no_source_once_it_is_taken():
    """Its last block is the first that others get; its full blocks before that are found again."""
    client, worker = engine(num_blocks=9, max_model_len=28, budget=28)
    first, second = (core_request(name, [ord(name) % 13] * 9, max_tokens=14) for name in "ab")
    client.add(first, second)
    while not client.stats or not client.stats.num_preemptions:
        client.step()
    waiting = client.core._scheduler._waiting.peek()
    assert client.core._kv.cached_prefix(waiting).num_tokens == 12
    check(client, worker, first, second)


def test_sources_that_the_first_copy_overwrites():
    """Everything is free, and the request's blocks are each other's sources."""
    specs = {"full": full(), "sliding": sliding(9)}
    client, worker = engine(specs, num_blocks=21, max_model_len=40)
    first = core_request("a", TOKENS[:3], max_tokens=1)
    client.add(first)
    client.run()
    pool = client.core._kv.pool
    for block in [2, 1, *range(20, 2, -1)]:  # in this order they will be taken
        pool.touch([block])
        pool.free([block])
    second = core_request("b", [*TOKENS[:2], 0], max_tokens=1)
    client.add(second)
    check(client, worker, second)
    assert copies_of(worker.steps[-1]) == [BlockCopy(1, 2), BlockCopy(2, 1)]


def test_completions_of_one_prompt_copy_its_end():
    client, worker = engine()
    client.add(core_request("a", TOKENS, max_tokens=12))
    client.step()
    others = [core_request(f"b{index}", TOKENS, seed=index) for index in range(3)]
    client.add(*others)
    client.step()
    assert len(copies_of(worker.steps[-1])) == 3
    assert [client.cached[f"b{index}"] for index in range(3)] == [13, 13, 13]
    check(client, worker, *others)
