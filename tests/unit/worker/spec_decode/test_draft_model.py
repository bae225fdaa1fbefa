"""A draft model on a device that works ahead: it guesses what it does on the host, and no text differs."""

import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.worker.spec_decode.draft_model import DraftModelProposer
from tests.fakes.noted_guesses import note_guesses, note_modes
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.unit.worker.forward.test_device import WHOLE, own_backends
from tests.unit.worker.forward.test_device_drafts import Run

__all__ = ["own_backends"]
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=8)]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("blocks", [100, 13])
@pytest.mark.parametrize("itself", [False, True], ids=["small", "itself"])
def test_it_guesses_what_it_does_on_the_host(monkeypatch, tmp_path, mode, blocks, itself):
    guesses = {}
    modes = note_modes(monkeypatch)
    note_guesses(monkeypatch, DraftModelProposer, lambda text, drafts: guesses.update({tuple(text): drafts}))
    checkpoint = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    draft = checkpoint if itself else make_checkpoint(tmp_path / "draft", "LlamaForCausalLM", 3, **SMALL)
    asked = {
        "speculative_config": {"model": str(draft), "num_speculative_tokens": 4, "adaptive": False},
        "num_gpu_blocks_override": blocks,
    }
    plain = Run(checkpoint, ahead=False, temperature=0.0)
    host = Run(checkpoint, ahead=False, settings=asked, temperature=0.0)
    on_host = {text: drafts for text, drafts in guesses.items() if text[0]}
    guesses.clear()
    found = Run(checkpoint, None, mode, settings=WHOLE | asked, temperature=0.0)
    assert host.tokens == found.tokens == plain.tokens
    wanted = GraphMode.NONE if mode == "NONE" else GraphMode.FULL
    behind = set() if mode == "NONE" else {"both"}
    assert {step for step, graph_mode in modes if graph_mode is wanted} == {"follow", "guess"} | behind
    both = guesses.keys() & on_host.keys()
    assert len(both) > (5 if itself or blocks < 100 else 20)
    # With few blocks there may be room for more drafts in one run than in the other.
    for text in both:
        pairs = zip(guesses[text], on_host[text], strict=blocks == 100)
        assert all(ours == theirs for ours, theirs in pairs), text
    if itself:
        counts = found.client.core.stats().drafts
        assert counts.num_accepted_tokens > 0.99 * counts.num_draft_tokens > 20
