"""Drafts change no token: the same text with and without, by a toy proposer, by n-grams and by suffixes."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from pagemill.catalog.proposers import PROPOSERS
from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import ConfigError
from pagemill.launch import build_config
from pagemill.messages.logprobs import joined
from pagemill.messages.pending import Ready
from pagemill.messages.step import SchedulerOutput
from pagemill.worker.batch.input_batch import build_batch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.spec_decode.drafts import GuessedDrafts
from pagemill.worker.spec_decode.interface import Proposer, Speculation
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.scripted_grammar import SOME_PLACES, at_positions, grammar_of
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import TEXTS, toy_proposer
from tests.marks import slow

PROMPTS = {"short": [5], "long": list(range(20, 61)), "other": list(range(100, 113)), "again": [9, 8, 7] * 5}
SETTINGS = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 24}


@pytest.fixture
def toy():
    with toy_proposer():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


class Watched(UniprocExecutor):
    """Counts the tokens of steps, and the steps."""

    num_steps = 0

    def sample_tokens(self, payloads=None):
        self.num_steps += 1
        return super().sample_tokens(payloads)


def run(checkpoint, speculation=None, depth=1, num_blocks=40, rule=None, dtype="float32", **params):
    config = build_config(
        EngineArgs(str(checkpoint), device="cpu", dtype=dtype, num_gpu_blocks_override=num_blocks, **SETTINGS)
    )
    executor = Watched(Worker(config, speculation=speculation))
    given = {} if rule is None else {"grammar_of": grammar_of(rule)}
    client = Client(EngineCore(config, executor, depth=depth, **given))
    client.add(*(core_request(name, prompt, max_tokens=30, **params) for name, prompt in PROMPTS.items()))
    client.run()
    client.core.check_integrity()
    client.core.shutdown()
    return client, executor.num_steps


CASES = [
    pytest.param({"temperature": 1.0, "seed": 7}, id="seeded"),
    slow({"temperature": 0.0, "dtype": "bfloat16"}, id="native"),
    slow({"temperature": 0.0, "repetition_penalty": 1.3}, id="penalties"),
    slow({"temperature": 0.0, "min_tokens": 20, "stop_token_ids": list(range(0, 300, 2))}, id="minimum"),
    slow({"temperature": 0.0, "rule": at_positions(SOME_PLACES)}, id="forced"),
]


@pytest.mark.parametrize("proposer", ["toy", "ngram", slow("suffix")])
@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("depth", [1, slow(2)])
def test_the_tokens_are_those_without_drafts(checkpoint, toy, proposer, params, depth):
    plain, num_plain = run(checkpoint, depth=depth, **params)
    TEXTS[:] = [[*PROMPTS[name], *tokens] for name, tokens in plain.tokens.items()]
    drafted, num_steps = run(checkpoint, Speculation(proposer, 4, adaptive=False), depth, **params)
    assert drafted.tokens == plain.tokens
    if proposer == "toy" and not ("rule" in params and depth > 1):  # drafts after a token in flight are not verified
        assert num_steps < num_plain
    few_blocks, _ = run(checkpoint, Speculation(proposer, 4), depth, num_blocks=9, **params)
    assert few_blocks.tokens == plain.tokens


@pytest.mark.slow
def test_accepted_drafts_have_their_own_log_probabilities(checkpoint, toy):
    asked = {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}
    plain, _ = run(checkpoint, **asked)
    TEXTS[:] = [[*PROMPTS[name], *tokens] for name, tokens in plain.tokens.items()]
    drafted, _ = run(checkpoint, Speculation("toy", 4, adaptive=False), **asked)
    for name, tokens in plain.tokens.items():
        found = joined(drafted.logprobs[name])
        expected = joined(plain.logprobs[name])
        assert found.token_ids[:, 0].tolist() == tokens == drafted.tokens[name]
        assert np.abs(found.values - expected.values).max() < 1e-3
    scored = {name: len(prompt) - 1 for name, prompt in PROMPTS.items() if len(prompt) > 1}
    assert {name: len(found) for name, found in drafted.prompt_logprobs.items()} == scored


class Recorder(Proposer):
    """Proposes nothing, and notes whose slots it is told of."""

    seen: ClassVar = []

    def __init__(self, context):
        self.states = context.states

    def begin(self, new):
        self.seen.append(("begin", new.request_id, new.slot, new.cache_salt))

    def end(self, slot):
        self.seen.append(("end", slot, self.states.num_tokens[slot] - self.states.num_prompt_tokens[slot]))

    def propose(self, slots):
        return [np.zeros(0, np.int32) for _ in slots]


def test_a_proposer_is_told_of_requests_their_salts_and_their_ends(checkpoint, monkeypatch):
    monkeypatch.setitem(PROPOSERS._paths, "recorder", f"{__name__}:Recorder")
    monkeypatch.setattr(Recorder, "seen", [])
    run(checkpoint, Speculation("recorder", 4), salt="mine", temperature=0.0)
    begun = [event for event in Recorder.seen if event[0] == "begin" and event[1] in PROMPTS]
    assert sorted(event[1] for event in begun) == sorted(PROMPTS)
    assert {event[3] for event in begun} == {"mine"}
    first = begun[-1][2]  # of three slots for four requests: it was another request's before
    assert ("end", first, 30) in Recorder.seen


def test_an_unknown_proposer_is_named(checkpoint):
    config = build_config(EngineArgs(str(checkpoint), device="cpu", dtype="float32", **SETTINGS))
    with pytest.raises(ConfigError, match=r"unknown proposer 'guess'; known: .*ngram"):
        EngineCore(config, UniprocExecutor(Worker(config, speculation=Speculation("guess", 2))))


@pytest.mark.parametrize(
    ("slots", "counts", "expected"),
    [
        ([2], [4], [0, 1, 2, -1]),
        ([2, 0, 1], [3, 1, 4], [0, 1, -1, -1, 6, 7, 8, -1]),
        ([2, 0, 1], [1, 1, 1], None),
    ],
)
def test_rows_of_a_step_find_their_drafts_on_the_device(slots, counts, expected):
    states = RequestStates(4, 32)
    states.num_tokens[:] = 9, 5, 12, 7
    states.num_computed[:] = states.num_tokens - 1
    slots, counts = np.array(slots, np.int32), np.array(counts, np.int32)
    guesses = GuessedDrafts(states, slots, counts - 1, 3, Ready(np.zeros((len(slots), 3), np.int32)))
    batch = build_batch(SchedulerOutput(0, slots, counts), states, counts)
    assert batch.known_rows is not None
    for one in (batch, replace(batch, known_rows=None)):
        found = guesses.rows(one)
        assert (found if found is None else found.tolist()) == expected
    others = build_batch(SchedulerOutput(0, np.array([3], np.int32), np.array([3], np.int32)), states, np.array([3]))
    assert guesses.rows(others) is None
