"""Heads that read one hidden state, on a device that works ahead, captured and not: they guess what they do on the
host, and no text differs."""

import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.worker.spec_decode.row_heads import RowHeadsProposer
from tests.fakes.noted_guesses import guesses_by_text, note_modes
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_row_heads import make_medusa, make_mlp_speculator
from tests.unit.worker.forward.test_device import WHOLE, own_backends
from tests.unit.worker.forward.test_device_drafts import Run

__all__ = ["own_backends"]
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture
def guesses(monkeypatch):
    return guesses_by_text(monkeypatch, RowHeadsProposer)


CASES = [
    (make_mlp_speculator, "FULL_AND_PIECEWISE", {"temperature": 0.8, "seed": 5}),
    (make_medusa, "FULL_AND_PIECEWISE", {"temperature": 0.0}),
    (make_medusa, "PIECEWISE", {"temperature": 0.8, "seed": 5}),
    (make_mlp_speculator, "NONE", {"temperature": 0.0}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "mode", "sampling"), CASES)
def test_they_guess_what_they_do_on_the_host(monkeypatch, checkpoint, guesses, tmp_path, make, mode, sampling):
    modes = note_modes(monkeypatch)
    heads = make(tmp_path / "heads")
    asked = {"speculative_config": {"model": str(heads), "num_speculative_tokens": 3, "adaptive": False}}
    plain = Run(checkpoint, ahead=False, **sampling)
    host = Run(checkpoint, ahead=False, settings=asked, **sampling)
    on_host = dict(guesses)
    guesses.clear()
    settings = asked if mode == "PIECEWISE" else WHOLE | asked
    found = Run(checkpoint, None, mode, settings=settings, **sampling)
    assert host.tokens == found.tokens == plain.tokens
    wanted = GraphMode.NONE if mode == "NONE" else GraphMode.FULL
    behind = {"both"} if mode == "FULL_AND_PIECEWISE" else set()
    assert {step for step, graph_mode in modes if graph_mode is wanted} == {"guess"} | behind
    both = guesses.keys() & on_host.keys()
    assert len(both) > 100
    assert all(len(drafts) == 3 for drafts in on_host.values())
    assert {text: guesses[text] for text in both} == {text: on_host[text] for text in both}


@pytest.mark.slow
def test_they_guess_for_requests_that_were_preempted(checkpoint, guesses, tmp_path):
    heads = make_mlp_speculator(tmp_path / "heads")
    asked = {"speculative_config": {"model": str(heads)}, "num_gpu_blocks_override": 11, "max_num_batched_tokens": 16}
    plain = Run(checkpoint, ahead=False, temperature=0.0)
    found = Run(checkpoint, None, "FULL_AND_PIECEWISE", settings=WHOLE | asked, temperature=0.0)
    assert found.client.stats.num_preemptions > 0
    assert found.tokens == plain.tokens
    assert guesses
