"""The only stage: which rows it gives to be sampled."""

import numpy as np
import torch

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest, SchedulerOutput
from pagemill.worker.batch.input_batch import build_batch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.pipeline.stage import SoloStage


def rows_of(counts):
    """Of two prompts of 3 and 1 tokens, of which `counts` are computed; hidden state i is i."""
    states = RequestStates(2, 8)
    for slot, length in enumerate((3, 1)):
        states.add(NewRequest(str(slot), slot, list(range(length)), length, 0, ([1],), SamplingParams()))
    batch = build_batch(SchedulerOutput(0, np.arange(2, dtype=np.int32), np.array(counts, np.int32)), states)
    hidden = torch.arange(float(batch.num_tokens)).unsqueeze(1)
    return SoloStage().pass_on(batch, hidden).flatten().tolist()


def test_the_last_token_of_each_complete_request_is_sampled_after():
    assert rows_of([3, 1]) == [2, 3]
    assert rows_of([1, 1]) == [1]


def test_hidden_states_are_not_copied_when_all_are_sampled_after():
    states = RequestStates(1, 8)
    states.add(NewRequest("0", 0, [5], 1, 0, ([1],), SamplingParams()))
    batch = build_batch(SchedulerOutput(0, np.zeros(1, np.int32), np.ones(1, np.int32)), states)
    hidden = torch.ones(1, 4)
    assert SoloStage().pass_on(batch, hidden).data_ptr() == hidden.data_ptr()
