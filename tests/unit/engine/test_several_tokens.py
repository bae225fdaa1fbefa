"""Steps that yield several tokens of a slot: drafts that are verified, and tokens that a grammar forces."""

import pytest

from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.messages.engine_io import FinishReason
from tests.fakes.engine_setup import Client, core_request, engine_config, full, sliding
from tests.fakes.scripted_grammar import after_start, after_threes, grammar_of
from tests.fakes.scripted_worker import ScriptedWorker, alone

pytestmark = pytest.mark.cases(one_in=4)

LENGTH = 64
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
RULES = pytest.mark.parametrize("rule", [after_threes, after_start])


def make(max_drafts=0, rule=None, depth=1, specs=None, overlap=False, **settings):
    worker = ScriptedWorker(specs, max_drafts=max_drafts)
    given = {} if rule is None else {"grammar_of": grammar_of(rule)}
    executor = UniprocExecutor(worker, overlap=overlap)
    core = EngineCore(engine_config(**settings), executor, depth=None if overlap else depth, **given)
    return Client(core), worker


def run(client, *requests):
    client.add(*requests)
    client.run()
    client.core.check_integrity()


def check(client, worker, requests, rule=None):
    for request in requests:
        expected = alone(request, worker.group_specs, worker.vocab_size, LENGTH, rule)
        assert client.tokens[request.request_id] == expected, request.request_id


def traffic():
    return [
        core_request("a", 5, max_tokens=30),
        core_request("b", 17, max_tokens=12, seed=3),
        core_request("c", 5, max_tokens=40, stop_token_ids=[4], min_tokens=9),
        core_request("d", 3, max_tokens=1),
        core_request("e", 30, max_tokens=60, seed=9),
        core_request("f", 6, emitted=[3, 101], max_tokens=20, seed=5, stop_token_ids=range(5, 15)),
    ]


@DEPTHS
@pytest.mark.parametrize("specs", [None, {"layer": full(), "window": sliding(7)}])
def test_tokens_of_verified_drafts_are_those_of_single_steps(depth, specs):
    client, worker = make(max_drafts=4, depth=depth, specs=specs)
    run(client, *traffic())
    check(client, worker, traffic())
    assert worker.num_accepted > 20 and worker.num_rejected > 5


@DEPTHS
@RULES
@pytest.mark.parametrize("specs", [None, {"layer": full(), "window": sliding(7)}])
def test_a_grammar_forces_tokens(depth, rule, specs):
    client, worker = make(rule=rule, depth=depth, specs=specs)
    run(client, *traffic())
    check(client, worker, traffic(), rule)
    assert worker.num_forced > 20


@DEPTHS
@RULES
def test_a_grammar_rules_out_drafts(depth, rule):
    client, worker = make(max_drafts=4, rule=rule, depth=depth)
    run(client, *traffic())
    check(client, worker, traffic(), rule)
    assert worker.num_forced > 20
    # With tokens in flight, it is not known which drafts would be verified.
    assert worker.num_accepted if depth == 1 else not worker.num_accepted


@pytest.mark.parametrize("rule", [None, after_start])
def test_a_worker_on_a_thread_of_its_own(rule):
    client, worker = make(max_drafts=3, rule=rule, overlap=True)
    run(client, *traffic())
    check(client, worker, traffic(), rule)
    client.core.shutdown()


@DEPTHS
@pytest.mark.parametrize("rule", [None, after_threes])
def test_little_memory_and_a_small_budget(depth, rule):
    """Requests give way to each other, and start again with what is cached."""
    client, worker = make(max_drafts=3, rule=rule, depth=depth, num_blocks=24, budget=14, max_num_seqs=4)
    run(client, *traffic())
    check(client, worker, traffic(), rule)
    assert client.core.stats().num_preemptions


@DEPTHS
@pytest.mark.parametrize("rule", [None, after_threes])
def test_what_several_tokens_filled_is_found_by_prefix(depth, rule):
    """All full blocks of computed tokens; the last token of an output is not, but where it was forced."""
    client, worker = make(max_drafts=3, rule=rule, depth=depth)
    for max_tokens in range(5, 20):
        prompt = [max_tokens, *range(1, 6)]
        first = core_request(f"first {max_tokens}", prompt, max_tokens=max_tokens)
        run(client, first)
        second = core_request(f"second {max_tokens}", [*prompt, *client.tokens[first.request_id], 1], max_tokens=3)
        run(client, second)
        check(client, worker, [first, second], rule)
        assert client.cached[second.request_id] >= (6 + max_tokens - 1) // 4 * 4 or rule


@DEPTHS
def test_blocks_that_drafts_filled_are_shared_before_they_leave_a_window(depth):
    def hits(max_drafts):
        client, worker = make(max_drafts=max_drafts, depth=depth, specs={"layer": full(), "window": sliding(2)})
        for seed in range(8):
            first = core_request(f"first {seed}", [seed, *range(1, 6)], max_tokens=23, seed=seed)
            run(client, first)
            prompt = [*first.prompt_token_ids, *client.tokens[first.request_id]]
            for length in range(8, len(prompt), 4):
                run(client, core_request(f"{seed} {length}", [*prompt[:length], 1], max_tokens=1))
            check(client, worker, [first])
        return client.cached

    assert hits(7) == hits(0)


def test_a_draft_that_stops_ends_the_output_within_a_step():
    client, _ = make(max_drafts=4)
    free = alone(core_request("a", 5, max_tokens=40), [full()], 13, LENGTH)
    stop = next(token for token in free[6:] if token not in free[:6])
    request = core_request("a", 5, max_tokens=40, stop_token_ids=[stop])
    run(client, request)
    assert client.tokens["a"] == free[: free.index(stop) + 1]
    assert (client.finish["a"].reason, client.finish["a"].stop_token_id) == (FinishReason.STOP, stop)


@DEPTHS
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_length_limit_within_forced_tokens(depth, max_tokens):
    client, worker = make(rule=after_start, depth=depth)
    request = core_request("a", 5, max_tokens=max_tokens)
    run(client, request)
    check(client, worker, [request], after_start)
    assert client.finish["a"].reason is FinishReason.LENGTH
    assert len(client.tokens["a"]) == max_tokens


@DEPTHS
def test_a_request_for_no_token_gets_none_that_is_forced(depth):
    client, _ = make(rule=after_start, depth=depth)
    run(client, core_request("a", 5, max_tokens=0))
    assert client.tokens.get("a", []) == []
    assert client.finish["a"].reason is FinishReason.LENGTH


@DEPTHS
@pytest.mark.parametrize("stop", [7, 103])
@pytest.mark.parametrize("min_tokens", [0, 2, 5])
def test_a_forced_token_may_be_a_stop_id(depth, stop, min_tokens):
    client, worker = make(rule=after_start, depth=depth)
    request = core_request("a", 5, max_tokens=30, stop_token_ids=[stop], min_tokens=min_tokens)
    run(client, request)
    check(client, worker, [request], after_start)
    assert (client.finish["a"].reason is FinishReason.STOP) == (client.tokens["a"][-1] == stop)


@pytest.mark.parametrize("rule", [None, after_start])
def test_an_abort_among_several_tokens_in_flight(rule):
    client, worker = make(max_drafts=3, rule=rule, depth=2)
    requests = traffic()
    client.add(*requests)
    for _ in range(4):
        client.step()
    client.core.abort(["a", "c"])
    client.run()
    check(client, worker, [request for request in requests if request.request_id not in "ac"], rule)
    client.core.check_integrity()


def test_a_grammar_is_shown_drafts_and_changes_none():
    grammars = []

    def remembered(core_request):
        grammars.append(grammar_of(after_threes)(core_request))
        return grammars[-1]

    worker = ScriptedWorker(max_drafts=3)
    client = Client(EngineCore(engine_config(), UniprocExecutor(worker), grammar_of=remembered))
    shown = []
    propose = worker._propose
    worker._propose = lambda state: shown.append(list(propose(state))) or state["drafts"]
    run(client, core_request("a", 5, max_tokens=40))
    (grammar,) = grammars
    assert len(grammar.seen_drafts) > 3
    assert all(drafts in shown for drafts in grammar.seen_drafts)
    assert grammar.output == client.tokens["a"]
