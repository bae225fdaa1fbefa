"""Steps of no request, on the null block: before the first request, and while only other replicas have work."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest, SchedulerOutput
from pagemill.utils.math import ceil_div

_NUM_TOKENS = 4


def worst_steps(
    block_sizes: Sequence[int], *, max_num_seqs: int, max_model_len: int, max_step_tokens: int
) -> Iterator[SchedulerOutput]:
    """Steps as large as there can be, on the null block: one request with as many tokens as a step may have, as many
    requests as there may be with equally many, and all of these with one token each. All are sampled, by every
    parameter there is. Slots are free again for whoever takes them next."""
    params = SamplingParams(temperature=0.5, top_k=50, top_p=0.9, min_p=0.01, seed=0)

    def step(num_requests: int, num_tokens: int) -> SchedulerOutput:
        slots = np.arange(num_requests, dtype=np.int32)
        new = [
            NewRequest(
                request_id=f"worst-{slot}",
                slot=slot,
                token_ids=np.zeros(num_tokens, np.int32),
                num_prompt_tokens=num_tokens,
                num_computed_tokens=0,
                block_ids=tuple([0] * ceil_div(num_tokens, size) for size in block_sizes),
                params=params,
            )
            for slot in slots.tolist()
        ]
        return SchedulerOutput(-1, slots, np.full(num_requests, num_tokens, np.int32), new, released=slots.tolist())

    longest = min(max_step_tokens, max_model_len)
    yield step(1, longest)
    several = min(max_num_seqs, max_step_tokens)
    yield step(several, min(longest, max_step_tokens // several))
    yield step(several, 1)


def warm_up_step(num_groups: int, max_model_len: int) -> SchedulerOutput:
    """A greedy request in slot 0, on block 0 of every group, no longer than a request may be. The slot is free again
    for whoever takes it next."""
    count = min(_NUM_TOKENS, max_model_len)
    new = NewRequest(
        request_id="warm-up",
        slot=0,
        token_ids=np.zeros(count, np.int32),
        num_prompt_tokens=count,
        num_computed_tokens=0,
        block_ids=tuple([0] for _ in range(num_groups)),
        params=SamplingParams(temperature=0.0),
    )
    return SchedulerOutput(step_id=-1, slots=np.zeros(1, np.int32), num_tokens=np.full(1, count, np.int32), new=[new])


def dummy_step(num_groups: int, max_model_len: int) -> SchedulerOutput:
    """`warm_up_step`, between others. The last occupant of slot 0 may not have been released yet: it is now, for what
    was kept for it must not outlive it; a second release does nothing."""
    return dataclasses.replace(warm_up_step(num_groups, max_model_len), released=[0])
