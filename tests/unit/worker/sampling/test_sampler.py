"""The sampler: greedy, drawn from the right distribution, and the same whatever else is in the batch."""

import numpy as np
import pytest
import torch

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NO_TOKEN, NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling.processors.interface import LogitsProcessor
from pagemill.worker.sampling.processors.min_tokens import MinTokensProcessor
from pagemill.worker.sampling.sampler import Sampler

VOCAB = 97


def make(params: list[SamplingParams], num_prompt_tokens: int = 3) -> Sampler:
    states = RequestStates(len(params), 64)
    sampler = Sampler(states, VOCAB)
    for slot, one in enumerate(params):
        new = NewRequest(str(slot), slot, [1] * num_prompt_tokens, num_prompt_tokens, 0, ([1],), one)
        states.add(new)
        sampler.add(new)
    return sampler


def batch_of(slots, positions) -> SampledRows:
    return SampledRows(np.asarray(slots, np.int32), np.asarray(positions, np.int64))


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_most_likely():
    logits = logits_of(4)
    assert make([SamplingParams(temperature=0)] * 4).sample(logits.clone(), batch_of(range(4), [3] * 4)).tolist() == (
        logits.argmax(-1).tolist()
    )


def test_each_row_is_the_same_alone_and_in_a_mixed_batch():
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.7, top_k=5),
        SamplingParams(seed=3, top_p=0.5),
        SamplingParams(seed=4, min_p=0.1, temperature=1.5),
        SamplingParams(seed=2**64 - 1, top_k=1),
    ]
    sampler, logits = make(params), logits_of(6)
    together = sampler.sample(logits.clone(), batch_of(range(6), range(3, 9)))
    order = [4, 2, 0, 5, 1, 3]
    shuffled = sampler.sample(logits[order].clone(), batch_of(order, [3 + row for row in order]))
    assert shuffled.tolist() == together[order].tolist()
    for row in range(6):
        alone = sampler.sample(logits[row : row + 1].clone(), batch_of([row], [3 + row]))
        assert alone[0] == together[row]
    assert together[0] == logits[0].argmax()
    assert together[5] == logits[5].argmax()


@pytest.mark.slow
def test_draws_follow_the_distribution():
    sampler = make([SamplingParams(seed=9, temperature=2.0, top_k=4)])
    logits = logits_of(1, seed=5)
    draws = np.array([int(sampler.sample(logits.clone(), batch_of([0], [p]))[0]) for p in range(3, 4003)])
    top = logits[0].topk(4)
    expected = (top.values / 2.0).softmax(0).numpy() * 4000
    counts = np.array([(draws == token).sum() for token in top.indices.tolist()])
    assert counts.sum() == 4000
    assert ((counts - expected) ** 2 / expected).sum() < 21.1  # 3 degrees of freedom: 0.9999 quantile


def test_min_tokens_blocks_stop_ids_until_enough_are_generated():
    sampler = make([SamplingParams(temperature=0, min_tokens=2, max_tokens=9, stop_token_ids=[7])])
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 5.0, 4.0
    chosen = [int(sampler.sample(logits.clone(), batch_of([0], [position]))[0]) for position in (3, 4, 5, 6)]
    assert chosen == [8, 8, 7, 7]


def test_a_slot_that_has_reached_min_tokens_asks_for_nothing_more():
    asking = SamplingParams(temperature=0, min_tokens=2, max_tokens=9, stop_token_ids=[7])
    sampler = make([asking, asking, SamplingParams(temperature=0)])
    seen = []
    for position in (3, 4, 5):
        sampler.sample(logits_of(2), batch_of([0, 2], [position] * 2))
        seen.append(sampler.active)
    assert seen == [True, True, True]  # the second request has not begun
    for position in (3, 4):
        assert sampler.active
        sampler.sample(logits_of(3), batch_of([0, 1, 2], [6, position, 6]))
    assert not sampler.active
    sampler.remove(0)
    sampler.remove(1)


class Always(LogitsProcessor):
    """Never done, and says nothing of it."""

    def add(self, new: NewRequest) -> bool:
        return True

    def remove(self, slot: int) -> None:
        pass

    def apply(self, logits: torch.Tensor, rows: SampledRows) -> None:
        logits[:, 0] = 100.0


def test_a_slot_is_processed_as_long_as_one_processor_asks_for_it():
    states = RequestStates(1, 64)
    sampler = Sampler(states, VOCAB, processors=[MinTokensProcessor, Always])
    params = SamplingParams(temperature=0, min_tokens=1, max_tokens=9, stop_token_ids=[7])
    new = NewRequest("0", 0, [1] * 3, 3, 0, ([1],), params)
    states.add(new)
    sampler.add(new)
    for position in (3, 4, 5):
        assert sampler.sample(logits_of(1), batch_of([0], [position])).tolist() == [0]
        assert sampler.active
    sampler.remove(0)
    assert not sampler.active


def test_a_recycled_slot_keeps_nothing_of_its_former_request():
    first = SamplingParams(seed=1, temperature=3.0, top_k=2, top_p=0.5, min_p=0.5, min_tokens=5, stop_token_ids=[0])
    sampler, fresh = make([first]), make([SamplingParams(seed=7)])
    sampler.remove(0)
    new = NewRequest("b", 0, [1, 1, 1], 3, 0, ([1],), SamplingParams(seed=7))
    sampler._states.add(new)
    sampler.add(new)
    for seed in range(20):
        logits = logits_of(1, seed)
        batch = batch_of([0], [3 + seed])
        assert sampler.sample(logits.clone(), batch) == fresh.sample(logits.clone(), batch)


class FailsAt(LogitsProcessor):
    """Takes part in requests with a logit_bias, and fails in one of its methods."""

    where = ""

    def add(self, new):
        return new.params.logit_bias is not None

    def remove(self, slot):
        if self.where == "remove":
            raise RuntimeError("cannot remove")

    def apply(self, logits, rows):
        if self.where == "apply":
            raise RuntimeError("cannot apply")

    def take_done(self):
        if self.where == "take_done":
            raise RuntimeError("cannot say")
        return [1, 99] if self.where == "unknown slots" else [0, 2] if self.where == "foreign slots" else ()


@pytest.mark.parametrize("where", ["apply", "take_done", "remove", "unknown slots", "foreign slots"])
def test_a_processor_that_fails_ends_its_own_requests_only(where):
    states = RequestStates(3, 64)
    sampler = Sampler(states, VOCAB, processors=[type("Fails", (FailsAt,), {"where": where})])
    for slot in range(3):
        bias = {5: 1.0} if slot == 1 else None
        params = SamplingParams(temperature=0, logit_bias=bias)
        new = NewRequest(str(slot), slot, [1] * 3, 3, 0, ([1],), params)
        states.add(new)
        sampler.add(new)
    logits = logits_of(3)
    best = logits.argmax(-1).tolist()
    ends = where in ("apply", "take_done", "unknown slots")
    assert sampler.sample(logits, batch_of(range(3), [3] * 3)).tolist() == [
        best[0],
        NO_TOKEN if ends else best[1],
        best[2],
    ]
    assert sampler.active
    sampler.remove(1)
    assert not sampler.active
