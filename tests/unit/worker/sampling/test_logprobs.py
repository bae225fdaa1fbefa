"""Log-probabilities next to numpy: of which logits, of which tokens, and that nothing is computed at once for all."""

import numpy as np
import pytest
import torch

from pagemill.config.choices import LogprobsMode
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling import logprobs
from pagemill.worker.sampling.sampler import Sampler

VOCAB = 50


def make(params, mode=LogprobsMode.RAW_LOGPROBS):
    states = RequestStates(len(params), 32)
    sampler = Sampler(states, VOCAB, logprobs_mode=mode)
    for slot, one in enumerate(params):
        new = NewRequest(str(slot), slot, [1, 2, 3], 3, 0, ([1],), one)
        states.add(new)
        sampler.add(new)
    return sampler


def rows_of(count):
    return SampledRows(np.arange(count, dtype=np.int32), np.full(count, 3, np.int64))


def logits_of(count, seed=0):
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def filtered(logits, temperature, top_k):
    """What a token is drawn from."""
    logits = logits / temperature
    return np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)


def check(found, row, token, values, num_candidates):
    """A row of `found` is what `values` say, the token first and then the most likely."""
    order = np.argsort(-values, kind="stable")[:num_candidates]
    width = 1 + num_candidates
    assert found.token_ids[row, :width].tolist() == [token, *order.tolist()]
    np.testing.assert_allclose(found.values[row, :width], values[[token, *order]], rtol=1e-5, atol=1e-5)
    assert found.ranks[row] == 1 + (values > values[token]).sum()


@pytest.mark.parametrize("mode", list(LogprobsMode))
def test_four_modes(mode):
    biased = {7: 4.0, 9: -100.0}
    params = [
        SamplingParams(temperature=0, logprobs=3, logit_bias=biased),
        SamplingParams(seed=5),
        SamplingParams(temperature=0.5, top_k=4, seed=3, logprobs=4),
        SamplingParams(temperature=1.0, seed=4, logprobs=0),
    ]
    sampler, logits = make(params, mode), logits_of(4)
    raw = logits.numpy().copy()
    plain = make([one.replace(logprobs=None) for one in params]).sample(logits.clone(), rows_of(4))
    tokens, found = sampler.sample_scored(logits, rows_of(4))
    assert tokens.tolist() == plain.tolist(), "the same tokens as without"
    assert found.indices.tolist() == [0, 2, 3]
    expected = raw.copy()
    if mode.processed:
        for token, bias in biased.items():
            expected[0, token] += bias
        expected[2] = filtered(raw[2], 0.5, 4)
    for place, (row, count) in enumerate([(0, 3), (2, 4), (3, 0)]):
        values = log_softmax(expected[row]) if mode.normalized else expected[row]
        check(found.logprobs, place, int(tokens[row]), values, count)


def test_named_tokens_take_the_place_of_the_most_likely():
    params = [SamplingParams(temperature=0, logprob_token_ids=[30, 2]), SamplingParams(temperature=0, logprobs=5)]
    logits = logits_of(2)
    expected = [log_softmax(row) for row in logits.numpy().copy()]
    tokens, found = make(params).sample_scored(logits, rows_of(2))
    assert found.logprobs.token_ids[0, :3].tolist() == [tokens[0], 30, 2]
    np.testing.assert_allclose(found.logprobs.values[0, 1:3], expected[0][[30, 2]], rtol=1e-5)
    check(found.logprobs, 1, int(tokens[1]), expected[1], 5)


def test_many_rows_are_copied_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(logprobs, "MAX_ROWS", 4)
    params = [SamplingParams(seed=slot, logprobs=slot % 7 if slot % 5 else None) for slot in range(23)]
    sampler, logits = make(params), logits_of(23)
    expected = [log_softmax(row) for row in logits.numpy().copy()]
    most, keep = [], sampler.logprobs._keep

    def noted(some, rows):
        kept = keep(some, rows)
        most.append(0 if kept is None else len(kept.logits))
        return kept

    sampler.logprobs._keep = noted
    tokens, found = sampler.sample_scored(logits, rows_of(23))
    assert max(most) <= 4
    asking = [slot for slot in range(23) if slot % 5]
    assert found.indices.tolist() == asking
    for place, slot in enumerate(asking):
        check(found.logprobs, place, int(tokens[slot]), expected[slot], slot % 7)


def test_a_slot_that_is_released_asks_for_nothing_more():
    sampler = make([SamplingParams(temperature=0, logprobs=1), SamplingParams(temperature=0)])
    assert sampler.active
    sampler.remove(0)
    assert not sampler.active
    assert sampler.sample_scored(logits_of(2), rows_of(2))[1] is None


def test_a_row_that_is_no_distribution_spoils_no_other():
    sampler, logits = make([SamplingParams(temperature=0, logprobs=2)] * 2), logits_of(2)
    logits[0, 3] = torch.nan
    expected = log_softmax(logits[1].numpy().copy())
    tokens, found = sampler.sample_scored(logits, rows_of(2))
    assert tokens[0] == -1
    check(found.logprobs, 1, int(tokens[1]), expected, 2)
