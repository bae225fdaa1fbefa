"""Processors on rows of random requests, with both histories."""

from collections.abc import Iterator

import numpy as np
import torch

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.history import DeviceHistory, HostHistory
from pagemill.worker.sampling.processors.interface import LogitsProcessor

VOCAB, PROMPT, LENGTH = 53, 9, 21


def tokens_of(slot: int) -> np.ndarray:
    """[LENGTH] of a slot's request, its prompt first."""
    return np.random.default_rng(slot).integers(0, VOCAB // 2, LENGTH).astype(np.int32)


def logits_of(count: int) -> torch.Tensor:
    return torch.stack([torch.randn(VOCAB, generator=torch.Generator().manual_seed(row)) * 3 for row in range(count)])


def processed(kind: type[LogitsProcessor], params: list[SamplingParams]) -> Iterator[torch.Tensor]:
    """`logits_of` requests with these parameters, changed; once for each kind of history. All must ask for it."""
    device = torch.device("cpu")
    for make in (lambda states: HostHistory(states, VOCAB), lambda _: DeviceHistory(len(params), VOCAB, device)):
        states = RequestStates(len(params), LENGTH)
        history = make(states)
        processor = kind(SamplerContext(states, VOCAB, device, history))
        for slot, one in enumerate(params):
            new = NewRequest(str(slot), slot, tokens_of(slot), PROMPT, 0, ([1],), one)
            states.add(new)
            assert processor.add(new)
            history.watch(new)
        logits = logits_of(len(params))
        slots = np.arange(len(params), dtype=np.int32)
        processor.apply(logits, SampledRows(slots, np.full(len(params), LENGTH, np.int64)))
        yield logits
