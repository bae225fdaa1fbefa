"""A head on a device that works ahead, captured and not: it guesses what it does on the host, and no text differs."""

import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.worker.forward.drafted_steps import DraftedSteps
from pagemill.worker.spec_decode.drafts import SlotDrafts
from pagemill.worker.spec_decode.heads import HeadProposer
from tests.fakes.noted_guesses import guesses_by_text, note_modes
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_heads import make_head
from tests.marks import slow
from tests.unit.worker.forward.test_device import WHOLE, own_backends
from tests.unit.worker.forward.test_device_drafts import Run

__all__ = ["own_backends"]
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture
def guesses(monkeypatch):
    return guesses_by_text(monkeypatch, HeadProposer)


@pytest.fixture
def modes(monkeypatch):
    """What steps of the head ran in."""
    return note_modes(monkeypatch)


CASES = [slow("eagle3", "NONE", 0), ("eagle3", "FULL_AND_PIECEWISE", 1), slow("eagle", "FULL_AND_PIECEWISE", 0)]


@pytest.mark.parametrize(("kind", "mode", "seed"), CASES)
def test_it_guesses_what_it_does_on_the_host(monkeypatch, checkpoint, guesses, modes, tmp_path, kind, mode, seed):
    head = make_head(tmp_path / "head", kind, seed, **({"draft_vocab_size": 90} if kind == "eagle3" else {}))
    asked = {"speculative_config": {"model": str(head), "num_speculative_tokens": 4, "adaptive": False}}
    sampling = {"temperature": 0.8, "seed": 5} if seed else {"temperature": 0.0}
    early = []
    fill = DraftedSteps._fill
    monkeypatch.setattr(DraftedSteps, "_fill", lambda *given: early.append(given) or fill(*given))
    plain = Run(checkpoint, ahead=False, **sampling)
    host = Run(checkpoint, ahead=False, settings=asked, **sampling)
    on_host = dict(guesses)
    guesses.clear()
    found = Run(checkpoint, None, mode, settings=WHOLE | asked, **sampling)
    assert host.tokens == found.tokens == plain.tokens
    both = guesses.keys() & on_host.keys()
    assert len(both) > 100
    assert {text: guesses[text] for text in both} == {text: on_host[text] for text in both}
    # Steps begin before the host knows what they verify.
    assert (len(early) > 20) == (mode != "NONE")
    wanted = GraphMode.NONE if mode == "NONE" else GraphMode.FULL
    behind = set() if mode == "NONE" else {"both"}
    assert {kind for kind, graph_mode in modes if graph_mode is wanted} == {"follow", "guess"} | behind


@pytest.mark.slow
def test_how_many_are_verified_may_follow_from_what_they_cost(monkeypatch, checkpoint, guesses, tmp_path):
    """Which is asked before guesses are known, too."""
    head = make_head(tmp_path / "head", "eagle3", draft_vocab_size=90)
    asked = {"speculative_config": {"model": str(head), "num_speculative_tokens": 4}}
    asks = []
    goes_on = SlotDrafts.goes_on
    monkeypatch.setattr(SlotDrafts, "goes_on", lambda *given: asks.append(goes_on(*given)) or asks[-1])
    plain = Run(checkpoint, ahead=False, temperature=0.0)
    found = Run(checkpoint, None, "FULL_AND_PIECEWISE", settings=WHOLE | asked, temperature=0.0)
    assert found.tokens == plain.tokens
    assert True in asks


@pytest.mark.slow
def test_it_guesses_in_a_crowded_cache_and_beside_backends_without_graphs(checkpoint, guesses, modes, tmp_path):
    head = make_head(tmp_path / "head", "eagle3", draft_vocab_size=90)
    asked = {"speculative_config": {"model": str(head), "num_speculative_tokens": 4}}
    plain = Run(checkpoint, ahead=False, temperature=0.0)
    crowded = {"num_gpu_blocks_override": 11, "max_num_batched_tokens": 16}
    found = Run(checkpoint, None, "FULL_AND_PIECEWISE", settings=WHOLE | asked | crowded, temperature=0.0)
    assert found.client.stats.num_preemptions > 0
    assert found.tokens == plain.tokens
    modes.clear()
    assert Run(checkpoint, None, "PIECEWISE", settings=asked, temperature=0.0).tokens == plain.tokens
    assert not modes


@pytest.mark.slow
def test_steps_of_more_requests_than_may_have_drafts_have_no_guesses_behind_them(checkpoint, monkeypatch, tmp_path):
    head = make_head(tmp_path / "head", "eagle3", draft_vocab_size=90)
    asked = {"speculative_config": {"model": str(head), "num_speculative_tokens": 4, "disable_by_batch_size": 2}}
    seen = []
    goes_on = SlotDrafts.goes_on

    def noted(self, slots):
        found = goes_on(self, slots)
        seen.append((len(slots), found))
        return found

    monkeypatch.setattr(SlotDrafts, "goes_on", noted)
    plain = Run(checkpoint, ahead=False, temperature=0.0)
    found = Run(checkpoint, None, "FULL_AND_PIECEWISE", settings=WHOLE | asked, temperature=0.0)
    assert found.tokens == plain.tokens
    assert {count for count, behind in seen if behind} == {1}
    assert max(count for count, _ in seen) > 1
