"""Steps on a device in which chance decides what is accepted."""

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


@pytest.mark.cases(one_in=4)
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
