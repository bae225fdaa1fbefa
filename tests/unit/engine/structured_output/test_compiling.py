import time

import pytest

from pagemill.engine.structured_output import compiling
from pagemill.engine.structured_output.compiling import GrammarQueue
from pagemill.grammar.backends import guidance
from pagemill.grammar.translate import translated
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.structured_outputs import GrammarSpec, StructuredOutputsParams
from pagemill.utils.sized_cache import SizedCache
from tests.fakes.byte_vocabulary import TABLE, ByteTokens


@pytest.fixture
def queue():
    queue = GrammarQueue(ByteTokens, len(TABLE.tokens), ())
    yield queue
    queue.shutdown()


def request_of(name, source=None, emitted=(), **form):
    source = source or translated(StructuredOutputsParams(**form))
    params = SamplingParams()
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[1], params=params, arrival_time=0.0, emitted_token_ids=list(emitted),
        grammar=GrammarSpec(source),
    )  # fmt: skip


def take(queue):
    deadline = time.monotonic() + 30
    found = []
    while len(queue) and time.monotonic() < deadline:
        found += queue.take_ready(idle=True)
    return found


def test_requests_wait_until_their_grammar_is_there(queue):
    queue.add(request_of("a", choice=["xy", "z"]))
    assert len(queue) == 1
    (request,) = take(queue)
    assert queue.grammar_of(request).end() is None
    assert queue.grammar_of(request) is None


def test_a_resumed_request_goes_on_where_it_was(queue):
    queue.add(request_of("a", choice=["xyz"], emitted=b"xy"))
    (request,) = take(queue)
    assert queue.grammar_of(request).forced_tokens() == [ord("z")]


def test_a_known_grammar_is_there_at_once_and_each_request_has_its_own_state(queue, monkeypatch):
    queue.add(request_of("a", choice=["xy", "z"]))
    (first,) = take(queue)
    queue.grammar_of(first).accept(b"xy")
    monkeypatch.setattr(queue, "_make", lambda request: pytest.fail("a thread makes it"))
    queue.add(request_of("b", choice=["xy", "z"]))
    assert "b" in queue
    assert [request.request_id for request in queue.take_ready(idle=False)] == ["b"]
    grammar = queue.grammar_of(request_of("b", choice=["xy", "z"]))
    assert grammar.end() is None
    grammar.accept(b"x")
    assert grammar.forced_tokens() == [ord("y")]


def test_a_known_grammar_follows_what_was_emitted_before(queue):
    for name, emitted in (("a", b""), ("b", b"xy")):
        queue.add(request_of(name, choice=["xyz"], emitted=emitted))
        (request,) = take(queue)
    assert queue.grammar_of(request).forced_tokens() == [ord("z")]


def test_a_grammar_that_is_none_is_its_requests_error(queue):
    queue.add(request_of("a", source='{"grammars": [{"lark_grammar": "start: nowhere"}]}'))
    queue.add(request_of("b", choice=["x"]))
    bad, good = sorted(take(queue), key=lambda request: request.request_id)
    with pytest.raises(ValueError, match="nowhere"):
        queue.grammar_of(bad)
    assert queue.grammar_of(good) is not None


def test_aborted_requests_are_forgotten(queue):
    queue.add(request_of("a", choice=["x"]))
    queue.abort(["a", "unknown"])
    assert not len(queue)
    assert take(queue) == []


def test_a_grammar_is_made_once_for_all_who_ask_at_the_same_time(queue, monkeypatch):
    made = []
    matcher = guidance.GuidanceBackend.matcher

    def slow(backend, source):
        made.append(source)
        time.sleep(0.05)
        return matcher(backend, source)

    monkeypatch.setattr(guidance.GuidanceBackend, "matcher", slow)
    bad = '{"grammars": [{"lark_grammar": "start: nowhere"}]}'
    for number in range(4):
        queue.add(request_of(f"good {number}", choice=["x", "y"]))
    good = [queue.grammar_of(request) for request in take(queue)]
    # Threads of former tests may still be at work.
    assert made.count(translated(StructuredOutputsParams(choice=["x", "y"]))) == 1
    good[0].accept(b"x")
    assert [grammar.end() is None for grammar in good] == [False, True, True, True]
    for number in range(2):
        queue.add(request_of(f"bad {number}", source=bad))
    for request in take(queue):
        with pytest.raises(ValueError, match="nowhere"):
            queue.grammar_of(request)


def test_the_grammar_that_was_used_longest_ago_is_forgotten_first(queue, monkeypatch):
    monkeypatch.setattr(queue, "_cache", SizedCache(2 * guidance.LEAST_BYTES, compiling._num_bytes))
    for number, text in enumerate("abac"):
        queue.add(request_of(str(number), choice=[text]))
        take(queue)
    assert list(queue._cache._values) == [translated(StructuredOutputsParams(choice=[text])) for text in "ac"]


def test_a_grammar_whose_states_ran_out_is_made_again(queue):
    for name in ("a", "b"):
        queue.add(request_of(name, choice=["xy", "z"]))
        (request,) = take(queue)
        assert queue.grammar_of(request).end() is None
        (kept,) = queue._cache._values.values()
        assert not kept.worn
        kept._states.worn = True


@pytest.mark.parametrize("error", [RuntimeError("odd"), SystemExit(1)])
def test_whatever_a_library_raises_ends_its_request_alone(queue, monkeypatch, error):
    def raises(backend, source):
        raise error

    monkeypatch.setattr(guidance.GuidanceBackend, "matcher", raises)
    queue.add(request_of("a", choice=["x"]))
    (request,) = take(queue)
    with pytest.raises(ValueError, match="cannot be made"):
        queue.grammar_of(request)


def test_the_cache_is_bounded_by_bytes(queue, monkeypatch):
    monkeypatch.setattr(queue, "_cache", SizedCache(3 * guidance.LEAST_BYTES, compiling._num_bytes))
    for number in range(8):
        queue.add(request_of(str(number), choice=[f"x{number}"]))
        take(queue)
    assert len(queue._cache) == 3
