"""Heads that guess blocks, on a device that works ahead: they guess what they do on the host, and no text differs."""

import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.worker.spec_decode.block_heads import BlockHeadProposer
from tests.fakes.noted_guesses import note_guesses, note_modes
from tests.fakes.tiny_block_heads import make_block_head
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.unit.worker.forward.test_device import WHOLE, own_backends
from tests.unit.worker.forward.test_device_drafts import Run

__all__ = ["own_backends"]
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=4)]
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("changes", [WINDOWS, {"draft_vocab_size": 90}], ids=["windows", "mapped"])
def test_they_guess_what_they_do_on_the_host(monkeypatch, tmp_path, mode, changes):
    guesses = {}
    modes = note_modes(monkeypatch)
    note_guesses(monkeypatch, BlockHeadProposer, lambda text, drafts: guesses.update({tuple(text): drafts}))
    checkpoint = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    head = make_block_head(tmp_path / "head", **changes)
    asked = {
        "speculative_config": {"model": str(head), "num_speculative_tokens": 4, "adaptive": False},
        "num_gpu_blocks_override": 200,
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
    assert len(both) > 100
    assert {text: guesses[text] for text in both} == {text: on_host[text] for text in both}
