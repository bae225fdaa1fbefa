"""Steps of no request, on the null block: before the first request, and while only other replicas have work."""

import dataclasses

import numpy as np

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest, SchedulerOutput

_NUM_TOKENS = 4


def warm_up_step(num_groups: int) -> SchedulerOutput:
    """A greedy request in slot 0, on block 0 of every group. The slot is free again for whoever takes it next."""
    new = NewRequest(
        request_id="warm-up",
        slot=0,
        token_ids=np.zeros(_NUM_TOKENS, np.int32),
        num_prompt_tokens=_NUM_TOKENS,
        num_computed_tokens=0,
        block_ids=tuple([0] for _ in range(num_groups)),
        params=SamplingParams(temperature=0.0),
    )
    return SchedulerOutput(
        step_id=-1, slots=np.zeros(1, np.int32), num_tokens=np.full(1, _NUM_TOKENS, np.int32), new=[new]
    )


def dummy_step(num_groups: int) -> SchedulerOutput:
    """`warm_up_step`, between others. The last occupant of slot 0 may not have been released yet: it is now, for what
    was kept for it must not outlive it; a second release does nothing."""
    return dataclasses.replace(warm_up_step(num_groups), released=[0])
