"""Drafts on a device that works ahead, on a CPU that behaves like one: what an engine writes is what it writes without,
whatever is in flight, captured, preempted, masked or counted."""

import contextlib

import numpy as np
import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.messages.logprobs import joined
from pagemill.model.kernels import ops
from pagemill.worker.forward.drafted_steps import DraftedSteps
from pagemill.worker.spec_decode.interface import Speculation
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.scripted_grammar import SOME_PLACES, at_positions, grammar_of
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import TEXTS, toy_proposer
from tests.marks import slow
from tests.unit.worker.forward.test_device import WHOLE, Roomy, own_backends, settings_of, steps_by_shape

__all__ = ["own_backends"]
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=10)]
PROMPTS = {
    "short": [5],
    "long": list(range(20, 61)),
    "other": list(range(100, 113)),
    "again": [9, 8, 7] * 5,
    "late": list(range(200, 209)),
}
TOY = Speculation("toy", 5, adaptive=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture
def toy():
    with toy_proposer():
        yield


class Run:
    """An engine that is done: its client, its platform, and the steps that its graphs chose."""

    def __init__(
        self, checkpoint, speculation=None, mode=None, ahead=True, rule=None, settings=None, platform=None, **params
    ):
        self.platform = None if mode is None else platform or QueuedPlatform()
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 96}
        config = settings_of(checkpoint, mode, **(limits | (settings or {})))
        worker = Worker(config, platform=self.platform, speculation=speculation)
        given = {} if rule is None else {"grammar_of": grammar_of(rule)}
        self.client = Client(EngineCore(config, UniprocExecutor(worker, overlap=ahead), **given))
        self.ran = [] if mode is None else steps_by_shape(worker)
        self.num_steps = self.client.core.num_executed
        self.client.add(*(core_request(name, prompt, max_tokens=30, **params) for name, prompt in PROMPTS.items()))
        self.client.run()
        self.client.core.check_integrity()
        self.num_steps = self.client.core.num_executed - self.num_steps
        self.tokens = self.client.tokens
        self.client.core.shutdown()


def plain(checkpoint, **params):
    """Without drafts, by the runner that waits; the toy knows the texts from then on."""
    found = Run(checkpoint, ahead=False, **params)
    TEXTS[:] = [[*PROMPTS[name], *tokens] for name, tokens in found.tokens.items()]
    return found


CASES = [
    pytest.param({"temperature": 0.0}, id="greedy"),
    pytest.param({"temperature": 1.0, "seed": 7, "top_k": 20}, id="seeded"),
    pytest.param({"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5}, id="penalties"),
    slow({"temperature": 0.0, "bad_words_token_ids": ((5, 6), (7,))}, id="bad words"),
    slow({"temperature": 0.0, "min_tokens": 20, "stop_token_ids": list(range(0, 300, 2))}, id="minimum"),
    pytest.param({"temperature": 0.0, "rule": at_positions(SOME_PLACES)}, id="forced"),
]


@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("ahead", [True, slow(False)])
def test_the_tokens_are_those_without_drafts(checkpoint, toy, monkeypatch, params, mode, ahead):
    expected = plain(checkpoint, **params)
    found = Run(checkpoint, TOY, mode, ahead, settings=WHOLE, **params)
    assert found.tokens == expected.tokens
    if not ("rule" in params and ahead):  # drafts after a token in flight are not verified
        assert found.num_steps < expected.num_steps
    if mode != "NONE" and "rule" not in params:
        assert {key.query_len for graph_mode, key in found.ran if graph_mode is GraphMode.FULL} >= {3, 6}


@pytest.mark.parametrize("proposer", ["toy", "ngram", slow("suffix")])
@pytest.mark.parametrize("mode", [slow("PIECEWISE"), "FULL_DECODE_ONLY", slow("FULL")])
def test_every_proposer_in_a_crowded_cache(checkpoint, toy, proposer, mode):
    sampling = {"temperature": 0.8, "seed": 11, "top_p": 0.95}
    expected = plain(checkpoint, **sampling)
    settings = {"num_gpu_blocks_override": 11, "max_num_batched_tokens": 16}
    backend = {} if mode == "PIECEWISE" else WHOLE
    found = Run(checkpoint, Speculation(proposer, 4), mode, settings=backend | settings, **sampling)
    assert found.client.stats.num_preemptions > 0
    assert found.tokens == expected.tokens


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", slow("FULL_AND_PIECEWISE")])
def test_accepted_drafts_on_a_device_have_their_own_log_probabilities(checkpoint, toy, mode):
    asked = {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}
    expected = plain(checkpoint, **asked)
    found = Run(checkpoint, TOY, mode, settings=WHOLE, **asked)
    for name, tokens in expected.tokens.items():
        ours = joined(found.client.logprobs[name])
        theirs = joined(expected.client.logprobs[name])
        assert ours.token_ids[:, 0].tolist() == tokens == found.tokens[name]
        assert np.abs(ours.values - theirs.values).max() < 1e-3
    assert found.client.prompt_logprobs.keys() == expected.client.prompt_logprobs.keys()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_a_start_that_measures_memory_precompiles_steps_that_verify(checkpoint, toy, mode, monkeypatch):
    verified, lengths = [], []

    @contextlib.contextmanager
    def compiling(device, precompilation, whole):
        for _ in precompilation:
            pass
        lengths.append(set(verified))
        yield

    run = DraftedSteps.run_shape

    def noted(self, graph_mode, key):
        verified.append(key.query_len)
        run(self, graph_mode, key)

    monkeypatch.setattr(ops, "compile_together", compiling)
    monkeypatch.setattr(DraftedSteps, "run_shape", noted)
    expected = plain(checkpoint, temperature=0.0)
    found = Run(checkpoint, TOY, mode, settings=WHOLE, platform=QueuedPlatform(memory=Roomy()), temperature=0.0)
    assert lengths == [{3, 6}]
    assert found.tokens == expected.tokens


def test_a_step_that_verifies_is_two_replays(checkpoint, toy, monkeypatch):
    """The network, and how it ends; as many uploads as steps."""
    replays, uploads = [], []
    run = DraftedSteps.run

    def noted(self, batch, tail):
        before = platform.maker.num_replays, platform.made.num_uploads
        found = run(self, batch, tail)
        if batch.num_tokens == len(batch.sampled_slots):  # nothing but drafts
            replays.append(platform.maker.num_replays - before[0])
            uploads.append(platform.made.num_uploads - before[1])
        return found

    expected = plain(checkpoint, temperature=0.0)
    platform = QueuedPlatform()
    monkeypatch.setattr(DraftedSteps, "run", noted)
    found = Run(checkpoint, TOY, "FULL_AND_PIECEWISE", settings=WHOLE, platform=platform, temperature=0.0)
    assert found.tokens == expected.tokens
    assert len(replays) > 10 and set(replays) == {2} and set(uploads) == {1}
