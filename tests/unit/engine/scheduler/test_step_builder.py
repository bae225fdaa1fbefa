"""A step in the making."""

import numpy as np

from pagemill.engine.scheduler.step_builder import StepBuilder
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest, SlotBlocks


def test_running_slots_come_first_and_the_budget_shrinks():
    step = StepBuilder(7, 20)
    step.run(np.array([3, 1]), np.array([1, 4]), [SlotBlocks(1, ([9],))])
    assert step.budget_left == 15
    new = NewRequest("r", 0, [1, 2, 3], 3, 0, ([5],), SamplingParams())
    step.admit(new, 3)
    assert step.budget_left == 12
    slots, num_tokens = step.arrays()
    message = step.finish(slots, num_tokens, [0], [])
    assert (message.slots.tolist(), message.num_tokens.tolist()) == ([3, 1, 0], [1, 4, 3])
    assert (message.slots.dtype, message.num_tokens.dtype) == (np.int32, np.int32)
    assert (message.step_id, message.new, message.released, message.total_tokens) == (7, [new], [0], 8)
    assert message.grown == [SlotBlocks(1, ([9],))]


def test_an_empty_step_has_no_slots():
    assert StepBuilder(0, 5).arrays()[0].size == 0
