"""Drafts change no text, whoever proposes them: three seeds, all that requests may ask for, few blocks, small chunks,
cached prefixes, sliding windows, steps in flight."""

import json
from pathlib import Path

import numpy as np
import pytest

from pagemill.messages.logprobs import joined
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.worker.spec_decode.interface import Speculation
from tests.conformance.drafted_runs import run_requests
from tests.fakes.engine_setup import core_request
from tests.fakes.masked_worker import forms, wide_table
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import TEXTS, toy_proposer

SEEDS = [0, 1, 2]
PROPOSERS = ["ngram", "suffix", "toy", "right", "wrong", "random"]
MODELS = ["LlamaForCausalLM", "Gemma3ForCausalLM"]  # the second one has sliding windows
FORM = "digits"
ASKED = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "stopping": {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": list(range(0, 300, 3))},
    "scored": {"temperature": 0.8, "logprobs": 2},
    FORM: {"temperature": 1.0},
    "second of two": {"temperature": 1.0},
}
FEW = {"LlamaForCausalLM": 9, "Gemma3ForCausalLM": 25}
"""KV cache blocks with which requests are preempted."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: str(make_checkpoint(tmp_path_factory.mktemp("tiny"), name)) for name in MODELS}


@pytest.fixture(autouse=True)
def toy():
    with toy_proposer():
        yield


@pytest.fixture(scope="module")
def grammar_of():
    return forms({FORM: StructuredOutputsParams(regex="[0-9]{20}")}, wide_table())


def requests(seed, number=0):
    """A request of each kind; one that comes again has another name."""
    noise = np.random.default_rng(seed)
    found = []
    for place, (name, params) in enumerate(ASKED.items()):
        some = noise.integers(4, 300, int(noise.integers(1, 9))).tolist()
        prompt = some * int(noise.integers(1, 6))
        given = {"max_tokens": 22, "seed": 100 * seed + place, **params}
        found.append(core_request(name if number == 0 or name == FORM else f"{name} {number}", prompt, **given))
    return found


def model_of(checkpoint):
    """The architecture of a tiny checkpoint."""
    return json.loads((Path(checkpoint) / "config.json").read_text())["architectures"][0]


def run(checkpoint, seed, grammar_of, speculation=None, depth=1, rounds=1, num_blocks=60, budget=64):
    """What a fresh engine says to the requests of a seed, and its counts."""
    num_blocks = num_blocks if isinstance(num_blocks, int) else num_blocks[model_of(checkpoint)]
    batches = [
        [one for one in requests(seed, number) if not number or one.request_id != FORM] for number in range(rounds)
    ]
    settings = {"num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": budget}
    return run_requests(checkpoint, *batches, speculation=speculation, depth=depth, grammar_of=grammar_of, **settings)


def know(client, seed):
    """Tell the proposers that know what follows."""
    TEXTS[:] = [[*one.prompt_token_ids, *client.tokens[one.request_id]] for one in requests(seed)]


CIRCUMSTANCES = {
    "alone": {},
    "few blocks": {"num_blocks": FEW},
    "small chunks": {"budget": 9},
    "in flight": {"depth": 2},
    "again": {"rounds": 2},
}


@pytest.fixture(scope="module")
def plain(checkpoints, grammar_of):
    """What each model says without drafts, under no special circumstances."""
    return {(model, seed): run(checkpoints[model], seed, grammar_of) for model in MODELS for seed in SEEDS}


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES)
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_text_is_that_without_drafts(checkpoints, grammar_of, plain, seed, proposer, circumstances):
    model = MODELS[seed % 2]
    expected, _ = plain[model, seed]
    know(expected, seed)
    speculation = Speculation(proposer, 3, adaptive=False)
    found, stats = run(checkpoints[model], seed, grammar_of, speculation, **circumstances)
    for name, tokens in expected.tokens.items():
        assert found.tokens[name] == tokens, name
        assert found.finish[name] == expected.finish[name]
        again = f"{name} 1"
        assert found.tokens.get(again, tokens) == tokens, again
    scores, reference = (joined(client.logprobs["scored"]) for client in (found, expected))
    assert scores.token_ids[:, 0].tolist() == expected.tokens["scored"]
    assert np.abs(scores.values - reference.values).max() < 1e-3
    if circumstances.get("num_blocks") is FEW:
        assert stats.num_preemptions > 0
    if proposer == "right":
        assert stats.drafts.num_accepted_tokens > 0.8 * stats.drafts.num_draft_tokens
    if proposer == "wrong":
        assert stats.drafts.num_accepted_tokens < 0.2 * stats.drafts.num_draft_tokens


@pytest.mark.parametrize("proposer", ["right", "wrong", "random"])
@pytest.mark.parametrize("seed", SEEDS)
def test_as_much_is_found_cached_as_without_drafts(checkpoints, grammar_of, seed, proposer):
    model = MODELS[seed % 2]
    expected, without = run(checkpoints[model], seed, grammar_of, rounds=2, num_blocks=200)
    know(expected, seed)
    speculation = Speculation(proposer, 3, adaptive=False)
    found, with_drafts = run(checkpoints[model], seed, grammar_of, speculation, rounds=2, num_blocks=200)
    assert found.tokens == expected.tokens
    assert without.prefix_cache_hits > 0
    assert with_drafts.prefix_cache_hits == without.prefix_cache_hits
