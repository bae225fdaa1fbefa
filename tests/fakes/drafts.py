"""Slots with tokens, for proposers."""

from collections.abc import Sequence

import numpy as np

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.request_states import RequestStates


def fill(states: RequestStates, slot: int, tokens: Sequence[int], num_prompt_tokens: int | None = None) -> None:
    """The slot has these tokens and no others."""
    states.token_ids[slot, : len(tokens)] = tokens
    states.num_tokens[slot] = len(tokens)
    states.num_prompt_tokens[slot] = len(tokens) if num_prompt_tokens is None else num_prompt_tokens


def new_request(slot: int, tokens: Sequence[int], salt: str | None = None) -> NewRequest:
    """As a worker is told of one."""
    return NewRequest(
        request_id="a",
        slot=slot,
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        block_ids=([],),
        params=SamplingParams(),
        cache_salt=salt,
    )
