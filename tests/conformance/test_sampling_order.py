"""Each step from logits to a token, and their order, against docs/sampling.md read in numpy: every parameter by itself
and all of them together, in mixed batches, on the host and as a device does it."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NO_TOKEN
from pagemill.model.kernels import native
from pagemill.worker.sampling.philox import uniform
from tests.conformance import sampling_reference as reference
from tests.conformance.sampling_reference import CHANGES, FILTERS, Request, Rows, distribution, may_be

VOCAB = 61
SLACK = 2e-6
"""Of a cumulative probability in float32."""


def ids(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]


PARAMETERS: dict[str, Any] = {
    "allowed_token_ids": lambda rng: sorted({*ids(rng, 1, 40)}),
    "bad_words_token_ids": lambda rng: [ids(rng, 1, 2) for _ in range(8)],
    "min_tokens": lambda rng: rng.choice([0, 5, 40]),
    "logit_bias": lambda rng: {token: rng.uniform(-6, 6) for token in ids(rng, 1, 20)},
    "repetition_penalty": lambda rng: rng.choice([0.7, 1.0, 1.3, 2.5]),
    "frequency_penalty": lambda rng: rng.uniform(-2, 2),
    "presence_penalty": lambda rng: rng.uniform(-2, 2),
    "temperature": lambda rng: rng.choice([0.0, 0.3, 1.0, 1.7]),
    "min_p": lambda rng: rng.choice([0.0, 0.02, 0.3]),
    "top_k": lambda rng: rng.choice([0, 1, 5, 30]),
    "top_p": lambda rng: rng.choice([0.2, 0.8, 0.97, 1.0]),
}


def batch_of(names: list[list[str]], seed: int) -> Rows:
    """A request for each list of parameters, of random values, prompt and output."""
    rng = random.Random(seed)
    requests = []
    for row, given in enumerate(names):
        params = {name: PARAMETERS[name](rng) for name in given}
        params |= {"seed": seed * 1000 + row, "stop_token_ids": ids(rng, 1, 5), "max_tokens": 50}
        requests.append(Request(SamplingParams(**params), ids(rng, 1, 12), ids(rng, 0, 10)))
    logits = torch.randn(len(names), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return Rows(requests, logits)


def expected(rows: Rows, steps: Any = (*CHANGES, *FILTERS)) -> list[np.ndarray]:
    return [
        distribution(logits.numpy(), request, steps) for logits, request in zip(rows.logits, rows.requests, strict=True)
    ]


def numbers(rows: Rows) -> list[float]:
    """What each row is drawn with."""
    seeds = np.array([request.params.seed for request in rows.requests], np.uint64)
    positions = np.array([len(request.prompt) + len(request.output) for request in rows.requests], np.int64)
    return uniform(seeds, positions).tolist()


def check(rows: Rows, tokens: list[int]) -> None:
    for row, found in enumerate(zip(tokens, expected(rows), numbers(rows), strict=True)):
        token, probs, number = found
        if not probs.any():
            right = token == NO_TOKEN
        elif rows.requests[row].params.greedy:
            right = probs[token] == 1
        else:
            right = may_be(token, probs, number, SLACK)
        assert right, f"row {row}, {rows.requests[row].params}: token {token} at {number}"


MIXED = [[name] for name in PARAMETERS] + [list(PARAMETERS)] * 20 + [[]] * 3


@pytest.fixture(params=["host", "host without native kernels", "device"])
def sample(request, monkeypatch):
    if "without" in request.param:
        monkeypatch.setenv("PAGEMILL_NATIVE_KERNELS", "0")
        native.library.cache_clear()
    yield dict(reference.samplers())[request.param.split()[0]]
    native.library.cache_clear()


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_step(sample, name):
    for seed in range(6):
        rows = batch_of([[name]] * 16, seed)
        check(rows, sample(rows))


def test_all_steps_together_in_mixed_batches(sample):
    for seed in range(100, 130):
        rows = batch_of(random.Random(seed).sample(MIXED, len(MIXED)), seed)
        check(rows, sample(rows))


def test_each_row_is_the_same_without_the_others(sample):
    rows = batch_of(MIXED, 7)
    together = sample(rows)
    for row, token in enumerate(together):
        alone = Rows([rows.requests[row]], rows.logits[row : row + 1])
        assert sample(alone) == [token]


def different(rows: Rows, one: Any, other: Any) -> int:
    pairs = zip(expected(rows, one), expected(rows, other), strict=True)
    return sum(not np.allclose(first, second) for first, second in pairs)


ORDER = (*CHANGES, *FILTERS)
MATTERS = {("bias", "penalties"), ("penalties", "temperature"), ("temperature", "min_p"), ("top_k", "top_p")}


@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise(ORDER)), ids=lambda step: step.__name__)
def test_these_batches_tell_orders_apart(first, second):
    """Where two neighbours in another order give something else, the batches above show which one it is."""
    swapped = [{first: second, second: first}.get(step, step) for step in ORDER]
    num_different = sum(different(batch_of(MIXED, seed), ORDER, swapped) for seed in range(100, 110))
    assert (num_different > 0) == ((first.__name__, second.__name__) in MATTERS)
