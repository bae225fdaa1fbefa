"""What a proposer is given of the model's hidden states, on the host and on a device that works ahead, is what the
reference computes."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagemill.catalog.proposers import PROPOSERS
from pagemill.errors import ModelError
from pagemill.worker.spec_decode.hidden_states import HiddenStates, WantedHidden
from pagemill.worker.spec_decode.interface import Speculation
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import Four
from tests.unit.worker.forward.test_device import WHOLE, own_backends
from tests.unit.worker.forward.test_device_drafts import PROMPTS, Run

__all__ = ["own_backends"]
pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=6)]
LAYERS = (3, 0, 4)
SEEN = {}
"""(token ids up to a position) -> what was given for it: sampled, final, layers."""


class Reader(Four):
    """Reads everything, and proposes four tokens."""

    def __init__(self, context):
        super().__init__(context)
        self.hidden = context.hidden

    @classmethod
    def wants(cls, draft):
        return WantedHidden(sampled=True, final=True, layers=LAYERS)

    def follow(self, slots):
        batch = self.hidden.batch
        assert batch.slots.tolist() == slots.tolist()
        sampled = dict(zip(batch.logits_index.tolist(), range(len(batch.logits_index)), strict=True))
        for row, (slot, position) in enumerate(zip(batch.token_slots.tolist(), batch.positions.tolist(), strict=True)):
            if position < self.states.num_computed[slot]:
                text = tuple(self.states.token_ids[slot, : position + 1].tolist())
                given = self.hidden.sampled[sampled[row]].clone() if row in sampled else None
                SEEN[text] = given, self.hidden.final[row].clone(), self.hidden.layers[row].clone()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture
def reader():
    SEEN.clear()
    PROPOSERS.add("reader", f"{__name__}:Reader")
    yield
    PROPOSERS.remove("reader")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "NONE", "FULL_AND_PIECEWISE", "PIECEWISE"])
def test_they_are_those_of_the_reference(checkpoint, reader, mode):
    params = {"temperature": 0.0}
    settings = {} if mode == "PIECEWISE" else WHOLE
    found = Run(checkpoint, Speculation("reader", 4, adaptive=False), mode, settings=settings, **params)
    plain = Run(checkpoint, ahead=False, **params)
    assert found.tokens == plain.tokens
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    num_sampled = 0
    for name, prompt in PROMPTS.items():
        text = [*prompt, *plain.tokens[name]]
        with torch.inference_mode():
            out = model(torch.tensor([text]), output_hidden_states=True)
        states = [states[0] for states in out.hidden_states]
        seen = [length for length in range(1, len(text)) if tuple(text[:length]) in SEEN]
        assert len(seen) == len(text) - 1
        for length in seen:
            sampled, final, layers = SEEN[tuple(text[:length])]
            expected = [states[index][length - 1] for index in LAYERS[:2]]
            torch.testing.assert_close(final, states[-1][length - 1], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(layers[: 2 * len(final)], torch.cat(expected), rtol=1e-3, atol=1e-4)
            normed = model.model.norm(layers[2 * len(final) :])
            torch.testing.assert_close(normed, final, rtol=1e-3, atol=1e-4)
            if sampled is not None:
                num_sampled += 1
                assert torch.equal(sampled, final)
    assert num_sampled >= sum(map(len, plain.tokens.values()))


def test_layers_that_there_are_not_are_refused(checkpoint):
    model = PagedModel.load(checkpoint).model
    with pytest.raises(ModelError, match="gives hidden states before layers 0 to 4, not 5"):
        HiddenStates(WantedHidden(layers=(1, 5)), model, None, torch.device("cpu"))


def test_only_what_is_wanted_has_memory(checkpoint):
    model = PagedModel.load(checkpoint).model
    hidden = HiddenStates(WantedHidden(sampled=True), model, (100, 7), torch.device("cpu"))
    assert [len(part) for part in (hidden.sampled, hidden.final, hidden.layers)] == [7, 0, 0]
    rows = torch.from_numpy(np.ones((3, model.hidden_size), np.float32))
    assert hidden.take(rows) is rows
    assert hidden.take_sampled(rows) is rows
    assert hidden.sampled[:3].eq(1).all()
