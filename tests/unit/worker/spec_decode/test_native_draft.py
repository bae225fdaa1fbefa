"""Steps of a draft model as native calls: the guesses are those of steps as batches, and as right."""

import itertools

import pytest

from pagemill.model.kernels.native import library
from pagemill.model.network.native_plan import NotPlannable
from pagemill.worker.spec_decode.adaptive import AdaptiveCounts
from pagemill.worker.spec_decode.draft_model import DraftModelProposer
from pagemill.worker.spec_decode.native_draft import NativeDraft
from tests.conformance.test_speculation_proposers import SMALL, Run, draft_of
from tests.fakes.noted_guesses import guesses_by_text, note_guesses
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.marks import slow

SETTINGS = {"dtype": "bfloat16", "cpu_threads": 1}
CIRCUMSTANCES = {"plain": {}, "few blocks": {"num_gpu_blocks_override": 19}, "in flight": {"depth": 2}}


@pytest.fixture(autouse=True)
def native():
    found = library()
    if found is None or found.isa() == b"portable":
        pytest.skip("this machine has no native plan")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "LlamaForCausalLM"))


def refuse(self, network, states):
    raise NotPlannable("for comparison")


@pytest.mark.parametrize("circumstances", ["plain", slow("few blocks"), slow("in flight")])
def test_the_guesses_are_those_of_batches(monkeypatch, tmp_path, checkpoint, circumstances):
    small = str(make_checkpoint(tmp_path / "small", "LlamaForCausalLM", 10, **SMALL))
    settings = SETTINGS | CIRCUMSTANCES[circumstances]
    guesses, lengths = [], []
    note_guesses(monkeypatch, DraftModelProposer, lambda text, drafts: guesses.append((text, drafts)))
    run = NativeDraft.run

    def counted(self, slots, starts, ends):
        found = run(self, slots, starts, ends)
        lengths.extend([] if found is None else (ends - starts).tolist())
        return found

    monkeypatch.setattr(NativeDraft, "run", counted)
    found = Run(checkpoint, draft_of(small), **settings)
    natively = [one for one in guesses if len(one[0]) > 1]
    assert len(lengths) > 100
    assert max(lengths) > 1
    guesses.clear()
    monkeypatch.setattr(NativeDraft, "__init__", refuse)
    in_batches = Run(checkpoint, draft_of(small), **settings)
    assert found.tokens == in_batches.tokens
    assert found.finish == in_batches.finish
    assert natively == [one for one in guesses if len(one[0]) > 1]


def test_a_model_that_guesses_for_itself_is_right_up_to_the_longest_text(checkpoint):
    """A row has the same bits in any batch."""
    plain = Run(checkpoint, **SETTINGS, max_model_len=72, params={"max_tokens": 71})
    drafted = Run(checkpoint, draft_of(checkpoint), **SETTINGS, max_model_len=72, params={"max_tokens": 71})
    assert drafted.tokens == plain.tokens
    assert drafted.finish == plain.finish
    assert drafted.acceptance > 0.99
    assert drafted.num_steps < 0.5 * plain.num_steps


@pytest.mark.parametrize("native", [True, slow(False)])
def test_what_nobody_asks_for_waits_until_somebody_does_or_a_block_is_full(monkeypatch, tmp_path, checkpoint, native):
    small = str(make_checkpoint(tmp_path / "small", "LlamaForCausalLM", 10, **SMALL))
    prompt = [9, 8, 7, 6, 5] * 4
    params = {"max_tokens": 64, "temperature": 0.7, "seed": 3}
    follow, waited, computed = DraftModelProposer.follow, [], []

    def noted(self, slots):
        follow(self, slots)
        states = self._states
        behind = states.num_computed[slots] - self._computed[slots]
        full = states.num_computed[slots] // 16 * 16
        assert (self._computed[slots] >= full).all()
        (waited if (behind > 0).any() else computed).append(self.is_asked)

    turns = itertools.count()
    monkeypatch.setattr(DraftModelProposer, "follow", noted)
    # When drafts are worth it depends on times; here, nobody is asked in seven of ten steps.
    monkeypatch.setattr(AdaptiveCounts, "pauses", lambda _: next(turns) % 10 > 2)
    if not native:
        monkeypatch.setattr(NativeDraft, "__init__", refuse)
    plain = Run(checkpoint, prompts={"one": prompt}, params=params, **SETTINGS)
    found = {}
    for adaptive in (False, True):
        seen = guesses_by_text(monkeypatch, DraftModelProposer)
        waited.clear()
        run = Run(checkpoint, draft_of(small, adaptive=adaptive), prompts={"one": prompt}, params=params, **SETTINGS)
        assert run.tokens == plain.tokens
        found[adaptive] = dict(seen)
        assert bool(waited) == adaptive
        assert not any(waited)
    assert len(waited) > 10
    both = found[True].keys() & found[False].keys()
    assert len(both) > 3
    for text in both:  # where a block ends, there may be room for more of them in one run than in the other
        assert all(one == other for one, other in zip(found[True][text], found[False][text], strict=False)), text
