"""Outputs with a form are the same however many steps are in flight, and requests with one run in every step."""

import threading
import time

import msgspec
import pytest

from pagemill.engine.core import EngineCore
from pagemill.engine.core_loop import CoreLoop
from pagemill.engine.executor.multiproc import MultiprocExecutor
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.engine.scheduler.scheduler import no_grammar
from pagemill.engine.structured_output.compiling import GrammarQueue
from pagemill.engine.waves import ROUND_STEPS, WaveMember
from pagemill.grammar.backends.guidance import GuidanceBackend
from pagemill.grammar.translate import translated
from pagemill.messages.core_calls import AddRequests
from pagemill.messages.engine_io import FinishReason
from pagemill.messages.structured_outputs import GrammarSpec, StructuredOutputsParams
from pagemill.messages.waves import JoinWaves, RoundDecision, RoundDone, WaveStarted
from tests.fakes.byte_vocabulary import END, TABLE, ByteTokens, Following, accepts
from tests.fakes.engine_setup import Client, core_request, engine_config
from tests.fakes.masked_worker import MaskedWorker, forms
from tests.marks import slow

pytestmark = pytest.mark.cases(one_in=4)

WAYS = pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, False), (3, False), (2, True)])
ANIMAL = {
    "type": "object",
    "properties": {"name": {"enum": ["cat", "cow", "dog"]}, "age": {"type": "integer"}, "wild": {"type": "boolean"}},
    "required": ["name", "age", "wild"],
    "additionalProperties": False,
}
FORMS = {
    "animal": {"json": ANIMAL, "disable_any_whitespace": True},
    "digits": {"regex": "[0-9]{30}"},
    "letters": {"regex": "([a-f]|xyz){12}"},
    "word": {"choice": ["yes, I do", "yes, I may", "no"]},
}
LONG = {"max_tokens": 60}


@pytest.fixture(scope="module")
def grammar_of():
    return forms({name: StructuredOutputsParams(**form) for name, form in FORMS.items()})


def make_client(grammar_of, depth=1, overlap=False, **settings):
    worker = MaskedWorker()
    config = engine_config(**({"max_model_len": 128, "num_blocks": 200} | settings))
    executor = UniprocExecutor(worker, overlap=overlap)
    return Client(EngineCore(config, executor, depth=depth, grammar_of=grammar_of)), worker


def requests():
    """With free ones among them."""
    names = ["animal", "free", "digits", "letters", "other", "word"]
    return [core_request(name, 5 + 3 * seed, seed=seed, **LONG) for seed, name in enumerate(names)]


def test_an_engine_that_waits_for_a_grammar_takes_part_in_the_steps_of_others(monkeypatch):
    """Others would stand in the middle of their steps until it is made."""
    go_on = threading.Event()
    matcher = GuidanceBackend.matcher

    def held_up(backend, source):
        assert go_on.wait(60)
        return matcher(backend, source)

    monkeypatch.setattr(GuidanceBackend, "matcher", held_up)
    client, worker = make_client(no_grammar)
    core = client.core
    core._grammars = GrammarQueue(ByteTokens, len(TABLE.tokens), ())
    reports = []

    def take(report):
        reports.append(report)
        if go_on.is_set():
            loop.inbox.put((0, RoundDecision(1, report.round, go_on=True)))

    loop = CoreLoop(core, lambda index, report: None, WaveMember(core.has_work, take))
    loop.inbox.put((0, JoinWaves(0, None)))
    request = core_request("word", 5, max_tokens=60)
    source = translated(StructuredOutputsParams(**FORMS["word"]))
    loop.inbox.put((0, AddRequests([msgspec.structs.replace(request, grammar=GrammarSpec(source))])))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        wait_until(lambda: worker.num_dummy_steps == 2 * ROUND_STEPS)
        assert reports == [WaveStarted(1), RoundDone(1, 0, has_work=True)]
        assert worker.num_masked == 0
        go_on.set()
        loop.inbox.put((0, RoundDecision(1, 0, go_on=True)))
        wait_until(lambda: worker.num_masked)
    finally:
        go_on.set()
        loop.stop()
        thread.join(60)
        core.shutdown()
    assert not thread.is_alive()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def expected(grammar_of):
    """Each by itself, one step at a time."""
    client, _ = make_client(grammar_of)
    for request in requests():
        client.add(request)
        client.run()
    vocabulary = Following()
    for name, form in FORMS.items():
        assert client.finish[name].reason is FinishReason.STOP
        text = b"".join(TABLE.tokens[token] for token in client.tokens[name] if token != END)
        assert accepts(vocabulary, text.decode(), **form)
    return client.tokens


@WAYS
def test_outputs_are_those_of_one_step_at_a_time(grammar_of, expected, depth, overlap):
    client, worker = make_client(grammar_of, depth, overlap)
    client.add(*requests())
    client.run()
    assert client.tokens == expected
    assert worker.num_masked
    client.core.shutdown()


@WAYS
@pytest.mark.parametrize("budget", [64, 7])
def test_preempted_outputs_go_on_as_they_would_have(grammar_of, expected, depth, overlap, budget):
    client, _ = make_client(grammar_of, depth, overlap, max_model_len=84, num_blocks=23, budget=budget)
    client.add(*requests())
    client.run()
    assert client.stats.num_preemptions > 0
    assert client.tokens == expected
    client.core.shutdown()


@pytest.mark.slow
@WAYS
def test_an_abort_changes_no_other_output(grammar_of, expected, depth, overlap):
    """At any step, and the slot is another request's after it."""
    for steps in range(1, 12):
        client, _ = make_client(grammar_of, depth, overlap, max_num_seqs=3)
        client.add(*requests())
        for _ in range(steps):
            client.step()
        client.core.abort(["digits"])
        client.tokens.pop("digits", None)
        client.run()
        assert client.tokens == {name: tokens for name, tokens in expected.items() if name != "digits"}
        client.core.shutdown()


@WAYS
def test_what_is_resumed_goes_on_as_it_would_have(grammar_of, expected, depth, overlap):
    """After a restart of the engine: the tokens that were sent are followed again."""
    client, _ = make_client(grammar_of, depth, overlap)
    sent = {request.request_id: 1 + place for place, request in enumerate(requests())}
    for request in requests():
        name = request.request_id
        emitted = expected[name][: sent[name]]
        client.add(core_request(name, request.prompt_token_ids, emitted=emitted, seed=request.params.seed, **LONG))
    client.run()
    assert client.tokens == {name: tokens[sent[name] :] for name, tokens in expected.items()}
    client.core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 1}, slow({"pipeline_parallel_size": 2})], ids=str)
def test_masks_reach_workers_in_processes_of_their_own(grammar_of, expected, sizes):
    config = engine_config(max_model_len=128, num_blocks=200)
    executor = MultiprocExecutor("tests.fakes.masked_worker:in_process", config, overlap=True, **sizes)
    client = Client(EngineCore(config, executor, grammar_of=grammar_of))
    try:
        client.add(*requests())
        client.run()
    finally:
        client.core.shutdown()
    assert client.tokens == expected


@pytest.mark.parametrize("depth", [2, 3])
def test_a_request_runs_in_every_step(grammar_of, depth):
    """Nothing is forced in it, so its steps are its tokens."""
    client, worker = make_client(grammar_of, depth)
    client.add(core_request("digits", 5, seed=1, **LONG))
    client.run()
    assert len(client.tokens["digits"]) == 30
    # One more is under way when the last digit has come.
    assert len(worker.steps) == 31


def test_steps_without_a_form_are_sampled_without_a_word(grammar_of, monkeypatch):
    client, worker = make_client(grammar_of, 2)
    said = []
    sample = worker.sample_tokens
    monkeypatch.setattr(worker, "sample_tokens", lambda payloads: said.append(payloads) or sample(payloads))
    client.add(core_request("free", 5, **LONG))
    client.run()
    assert len(said) >= 60
    assert set(said) == {None}
