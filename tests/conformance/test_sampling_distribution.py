"""20,000 draws of one request follow the distribution that its parameters describe (chi-square), on the host, with and
without native kernels, and as a device does it."""

import numpy as np
import pytest
import torch

from pagemill.messages.sampling_params import SamplingParams
from pagemill.model.kernels import native
from pagemill.worker.batch.device_states import DeviceStates
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.device_sampler import sample_random
from tests.conformance.sampling_reference import Request, Rows, distribution, prepared

VOCAB, DRAWS, PER_CALL = 200, 20_000, 2_000
CASES = [
    {},
    {"temperature": 0.4},
    {"temperature": 1.9},
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.08},
    {"temperature": 1.4, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
]


def limit(degrees: int) -> float:
    """About the 1 - 1e-6 quantile of chi-square (Wilson and Hilferty)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.753 * part**0.5) ** 3


def draws(params: SamplingParams, logits: torch.Tensor, device: bool) -> np.ndarray:
    """Of one slot, at as many positions: each of them has noise of its own."""
    states, sampler, _ = prepared(Rows([Request(params, [1], [])], logits))
    found = []
    for start in range(1, DRAWS + 1, PER_CALL):
        rows = SampledRows(np.zeros(PER_CALL, np.int32), np.arange(start, start + PER_CALL))
        same = logits.repeat(PER_CALL, 1)
        if device:
            settings = torch.from_numpy(DeviceStates.sampling_rows(states, np.zeros(1, np.int32)))
            tokens = sample_random(same, settings, torch.from_numpy(rows.slots), torch.from_numpy(rows.positions))
            found.append(tokens.numpy())
        else:
            found.append(sampler.sample(same, rows))
    return np.concatenate(found)


@pytest.fixture(params=["host", "host without native kernels", "device"])
def place(request, monkeypatch):
    if "without" in request.param:
        monkeypatch.setenv("PAGEMILL_NATIVE_KERNELS", "0")
        native.library.cache_clear()
    yield request.param
    native.library.cache_clear()


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_draws_follow_the_distribution(place, fields):
    params = SamplingParams(seed=11, **fields)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    counts = np.bincount(draws(params, logits, place == "device"), minlength=VOCAB)
    wanted = distribution(logits[0].numpy(), Request(params, [1], [])) * DRAWS
    assert counts[wanted == 0].sum() == 0
    rare = (wanted > 0) & (wanted < 10)
    if rare.any():  # taken together: chi-square is for counts that are not small
        wanted, counts = (np.append(values[~rare], values[rare].sum()) for values in (wanted, counts))
    kept = wanted > 0
    statistic = ((counts[kept] - wanted[kept]) ** 2 / wanted[kept]).sum()
    assert statistic < limit(int(kept.sum()) - 1)


def test_another_seed_draws_otherwise_and_the_same_seed_the_same():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    first, again, other = (draws(SamplingParams(seed=seed), logits, False) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert 0 < (first == other).mean() < 0.1
