"""The first stage waits for tokens only when a step needs them, and gives none to a slot's next request."""

from collections import deque

import numpy as np
import pytest
import torch

from pagemill.errors import DistributedError
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest, SchedulerOutput
from pagemill.model.distributed.group import SoloGroup, Transfer
from pagemill.worker.batch.input_batch import build_batch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.pipeline import linked_stage
from pagemill.worker.pipeline.linked_stage import LinkedStage


class Arrival(Transfer):
    """A receive that is filled when it is waited for."""

    def __init__(self, group, tensor):
        self.group, self.tensor = group, tensor

    def wait(self):
        self.group.num_waits += 1
        if not self.group.tokens:
            raise DistributedError("gone")
        self.tensor.copy_(torch.tensor(self.group.tokens.popleft(), dtype=torch.int32))


class FakeGroup(SoloGroup):
    """Stage 0 of 2; `tokens` are those that the last stage has sent."""

    def __init__(self):
        super().__init__()
        self.size, self.tokens, self.num_waits, self.sent = 2, deque(), 0, []

    def irecv(self, tensor, source):
        assert source == 1
        return Arrival(self, tensor)


@pytest.fixture
def first():
    group, states = FakeGroup(), RequestStates(4, 16)
    return LinkedStage(group, states, hidden_size=2, dtype=torch.float32, device="cpu"), states, group


def admit(stage, states, slot, *token_ids):
    new = NewRequest(f"r{slot}", slot, list(token_ids), len(token_ids), 0, ([1],), SamplingParams(temperature=0))
    states.add(new)
    stage.restart(new.slot)


def run(stage, states, *slots):
    """One step: all known tokens of these slots; the batch."""
    slots = np.array(slots, np.int32)
    stage.settle(slots)
    step = SchedulerOutput(0, slots, states.num_tokens[slots] - states.num_computed[slots])
    batch = build_batch(step, states)
    states.advance(step.slots, step.num_tokens)
    stage.expect(batch)
    return batch


def test_a_step_waits_for_the_tokens_that_it_feeds_on(first):
    stage, states, group = first
    admit(stage, states, 0, 5, 6)
    admit(stage, states, 1, 7)
    run(stage, states, 0)
    run(stage, states, 1)
    assert group.num_waits == 0, "the steps have no request in common"
    group.tokens += [[50], [70]]
    assert run(stage, states, 0).token_ids.tolist() == [50]
    assert group.num_waits == 1
    assert run(stage, states, 1).token_ids.tolist() == [70]
    assert not stage.samples


def test_tokens_of_a_slots_former_request_are_dropped(first):
    stage, states, group = first
    admit(stage, states, 0, 5, 6)
    admit(stage, states, 1, 7)
    run(stage, states, 0, 1)
    admit(stage, states, 0, 8, 9, 10)
    group.tokens += [[50, 70], [80, 71]]
    batch = run(stage, states, 0, 1)
    assert batch.token_ids.tolist() == [8, 9, 10, 70]
    assert run(stage, states, 0, 1).token_ids.tolist() == [80, 71]


def test_tokens_that_nobody_asks_for_do_not_pile_up(first, monkeypatch):
    monkeypatch.setattr(linked_stage, "MAX_EXPECTED", 3)
    stage, states, group = first
    group.tokens += [[1]] * 10
    for _ in range(10):
        admit(stage, states, 0, 5)
        run(stage, states, 0)
    assert group.num_waits == 7


def test_a_dead_peer_does_not_keep_a_stage_from_closing(first):
    stage, states, _ = first
    admit(stage, states, 0, 5)
    run(stage, states, 0)
    with pytest.raises(DistributedError):
        stage.settle(np.zeros(1, np.int32))
    admit(stage, states, 1, 5)
    run(stage, states, 1)
    stage.close()


class Telling(SoloGroup):
    """A stage of two: all that is broadcast is what `said` has, or is kept there by the last."""

    def __init__(self, rank, said):
        super().__init__()
        self.rank, self.size, self.said = rank, 2, said

    def broadcast(self, tensor, source):
        assert source == 1
        if self.rank == source:
            self.said.append(tensor.clone())
            return tensor
        return tensor.copy_(self.said.popleft())


@pytest.mark.parametrize("values", [(), (3,), (4, 0, 0, 2)])
def test_stages_are_told_what_the_last_one_says(values):
    said = deque()

    def stage(rank):
        return LinkedStage(Telling(rank, said), RequestStates(1, 4), hidden_size=2, dtype=torch.float32, device="cpu")

    assert stage(1).told(values) == values
    assert stage(0).told((7, 7, 7)) == values
    assert not said
