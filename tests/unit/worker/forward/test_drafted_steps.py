"""Steps on a device in which chance decides what is accepted, or rejection sampling."""

import pytest

from pagemill.worker.spec_decode.interface import Speculation
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import toy_proposer
from tests.unit.worker.forward.test_device import WHOLE, own_backends
from tests.unit.worker.forward.test_device_drafts import PROMPTS, Run

__all__ = ["own_backends"]
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize(("rates", "accepted"), [((1.0, 1.0, 0.0, 0.0), 2), ((0.0, 0.0, 0.0, 0.0), 0)])
def test_chance_accepts_drafts_as_often_as_it_should(checkpoint, mode, rates, accepted):
    asked = Speculation(
        "four", 4, adaptive=False, rejection_sample_method="synthetic", synthetic_acceptance_rates=rates
    )
    with toy_proposer():
        found = Run(checkpoint, asked, mode, settings=WHOLE, temperature=0.0)
    counts = found.client.core.stats().drafts
    whole = counts.num_drafts - len(PROMPTS)  # the last ones of a request have no room for all
    assert counts.num_drafts >= whole > 20
    assert accepted * whole <= counts.num_accepted_tokens <= accepted * counts.num_drafts
    assert {len(tokens) for tokens in found.tokens.values()} == {30}


SAMPLING = {
    "drawn": {"temperature": 0.9, "seed": 5},
    "filtered": {"temperature": 1.2, "seed": 6, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2, "logprobs": 2},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.slow
@pytest.mark.cases(one_in=12)
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_rejection_sampling_draws_what_it_does_on_the_host(checkpoint, mode, sampling):
    """Steps wait for tokens: otherwise it depends on times which drafts there are, and so which token is drawn."""
    params = SAMPLING[sampling]
    asked = Speculation("four", 4, adaptive=False, rejection_sample_method="standard")
    settings = {"max_num_batched_tokens": 128}
    with toy_proposer():
        host = Run(checkpoint, asked, ahead=False, settings=settings, **params)
        found = Run(checkpoint, asked, mode, ahead=False, settings=WHOLE | settings, **params)
    assert found.tokens == host.tokens
    counts = [run.client.core.stats().drafts for run in (host, found)]
    assert counts[1].num_draft_tokens == counts[0].num_draft_tokens > 100
    assert counts[1].num_accepted_tokens == counts[0].num_accepted_tokens
    plain = Run(checkpoint, ahead=False, settings=settings, **params)
    assert (found.tokens == plain.tokens) == (sampling == "greedy"), "another token is drawn where a draft was"
