"""Other ways to accept drafts: exact rejection sampling keeps greedy text, chance accepts as often as was asked."""

import pytest

from pagemill.worker.spec_decode.interface import Speculation
from tests.conformance.drafted_runs import run_requests
from tests.fakes.engine_setup import core_request
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import TEXTS, toy_proposer

PROMPT = [9, 8, 7, 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


@pytest.fixture(autouse=True)
def toy():
    with toy_proposer():
        yield


def many(first_seed, count, **params):
    return [core_request(str(seed), PROMPT, seed=seed, **params) for seed in range(first_seed, first_seed + count)]


def test_greedy_text_is_exact(checkpoint):
    asked = many(0, 3, temperature=0.0, max_tokens=30)
    expected, _ = run_requests(checkpoint, asked)
    TEXTS[:] = [[*PROMPT, *expected.tokens["0"]]]
    for proposer in ("toy", "right", "wrong", "random", "ngram"):
        speculation = Speculation(proposer, 4, adaptive=False, rejection_sample_method="standard")
        found, _ = run_requests(checkpoint, asked, speculation=speculation)
        assert found.tokens == expected.tokens, proposer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({"synthetic_acceptance_length": 2.5}, 2.5),
        ({"synthetic_acceptance_length": 1.0}, 1.0),
        ({"synthetic_acceptance_length": 5.0}, 5.0),
        ({"synthetic_acceptance_rates": (0.9, 0.5, 0.25, 0.0)}, 2.65),
    ],
)
def test_chance_accepts_as_often_as_asked(checkpoint, temperature, given, length):
    speculation = Speculation("four", 4, adaptive=False, rejection_sample_method="synthetic", **given)
    _, stats = run_requests(checkpoint, many(0, 24, temperature=temperature, max_tokens=80), speculation=speculation)
    counts = stats.drafts
    full = counts.num_draft_tokens / counts.num_drafts
    assert full > 3.5, "nearly every step has four drafts"
    assert abs(1 + counts.num_accepted_tokens / counts.num_drafts - length) < 0.25 + 0.02 * length
