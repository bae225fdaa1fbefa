"""Hidden states of layers on any stage arrive on the last one, and are those of the whole model."""

from dataclasses import replace

import pytest
import torch

from pagemill.errors import ModelError
from pagemill.model.distributed.group import SoloGroup
from pagemill.model.distributed.parallel_groups import solo_groups
from pagemill.worker.spec_decode.hidden_states import WantedHidden
from pagemill.worker.spec_decode.stage_states import StageStates
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint

PROMPT = list(range(5, 42))


class StageGroup(SoloGroup):
    """The group of one of several stages that a test carries hidden states between."""

    def __init__(self, stage, count):
        super().__init__()
        self.rank, self.size = stage, count


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def whole(checkpoint):
    """What each of the four layers reads, and what the last one gives."""
    model = PagedModel.load(checkpoint, max_len=64)
    model.model.keep_hidden(range(5))
    _, kept = given(model)
    return kept


def staged(checkpoint, stage, count):
    return PagedModel.load(checkpoint, groups=replace(solo_groups(), pp=StageGroup(stage, count)), max_len=64)


@torch.inference_mode()
def given(model, hidden=None):
    (found,) = model._chunks(PROMPT, len(PROMPT), None, hidden)
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("layers", [(3, 0, 4), (2,), (1, 1, 2), (4,)], ids=str)
def test_states_travel_to_the_last_stage(checkpoint, whole, layers, count):
    hidden = None
    for stage in range(count):
        model = staged(checkpoint, stage, count)
        states = StageStates(WantedHidden(final=stage == count - 1, layers=layers), model.model, torch.device("cpu"))
        first = stage and min(int(index) for index in model.model.layers)
        assert list(states.arriving) == sorted({index for index in layers if index < first})
        if hidden is not None:
            assert hidden.shape[:-2] == ((1 + len(states.arriving),) if states.arriving else ())
            hidden = states.arrive(hidden)
        hidden = states.take(given(model, hidden))
    assert hidden.shape == states.final.shape == (len(PROMPT), 64)
    torch.testing.assert_close(states.layers, torch.cat([whole[index] for index in layers], dim=-1))


def test_a_layer_that_no_stage_has_is_refused_on_each(checkpoint):
    for stage in (0, 1):
        with pytest.raises(ModelError, match="hidden states before layers 0 to 4, not 5"):
            StageStates(WantedHidden(layers=(1, 5)), staged(checkpoint, stage, 2).model, torch.device("cpu"))
