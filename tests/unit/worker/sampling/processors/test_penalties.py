"""Penalties against transformers' processor and the formulas in numpy, float32."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.worker.sampling.processors.penalties import PenaltiesProcessor
from tests.unit.worker.sampling.processors.rows import PROMPT, VOCAB, logits_of, processed, tokens_of


def test_repetition_is_that_of_transformers():
    penalties = [1.3, 0.7, 2.0]
    expected = [
        RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(tokens_of(slot)).long()[None], row[None].clone())[0]
        for slot, (penalty, row) in enumerate(zip(penalties, logits_of(3), strict=True))
    ]
    params = [SamplingParams(repetition_penalty=penalty) for penalty in penalties]
    for logits in processed(PenaltiesProcessor, params):
        torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=0)


def test_frequency_and_presence_count_the_output_only():
    given = [(0.5, 0.0), (0.0, -1.5), (-2.0, 2.0)]
    expected = logits_of(3).numpy()
    for slot, (frequency, presence) in enumerate(given):
        counts = np.bincount(tokens_of(slot)[PROMPT:], minlength=VOCAB).astype(np.float32)
        expected[slot] -= np.float32(frequency) * counts
        expected[slot] -= np.float32(presence) * (counts > 0)
    params = [SamplingParams(frequency_penalty=f, presence_penalty=p) for f, p in given]
    for logits in processed(PenaltiesProcessor, params):
        np.testing.assert_array_equal(logits.numpy(), expected)


def test_a_row_is_the_same_alone_and_beside_others():
    params = [
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(frequency_penalty=0.3),
        SamplingParams(presence_penalty=1.0, repetition_penalty=0.8),
    ]
    together = next(processed(PenaltiesProcessor, params))
    for row in range(2):
        alone = next(processed(PenaltiesProcessor, params[: row + 1]))
        assert torch.equal(alone[row], together[row])


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(logit_bias={1: 2.0})])
def test_it_is_not_asked_for_by_default(params):
    with pytest.raises(AssertionError):
        next(processed(PenaltiesProcessor, [params]))
