"""Every kind of KV group at once, through the real worker: the tokens that a naive reading of the model gives."""

import dataclasses
import random

import pytest

from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from tests.fakes.engine_setup import Client, core_request, engine_config
from tests.fakes.hybrid_model import VOCAB, HybridModel, HybridWorker

COUNT = 24


@pytest.fixture(scope="module")
def prompts():
    """Half of them begin alike."""
    rng = random.Random(0)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    return [
        (shared[: rng.randrange(25, 41)] if index % 2 else []) + [rng.randrange(VOCAB) for _ in range(1 + index)]
        for index in range(10)
    ]


@pytest.fixture(scope="module")
def expected(prompts):
    model = HybridModel()
    return [model.greedy(prompt, COUNT) for prompt in prompts]


def run(prompts, rounds=1, **settings):
    """Tokens of each prompt in the last round, and the client."""
    config = engine_config(**({"max_model_len": 96, "num_blocks": 400} | settings))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
    client = Client(EngineCore(config, UniprocExecutor(HybridWorker(config))))
    for index in range(rounds):
        names = [f"{index}.{row}" for row in range(len(prompts))]
        client.add(
            *(core_request(name, p, max_tokens=COUNT, temperature=0) for name, p in zip(names, prompts, strict=True))
        )
        client.run()
    return [client.tokens[name] for name in names], client


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
def test_a_batch_equals_the_naive_model(prompts, expected, caching):
    assert run(prompts, caching=caching)[0] == expected


@pytest.mark.slow
def test_chunks_of_prompts_do_not_matter(prompts, expected):
    assert run(prompts, budget=7, max_num_seqs=3)[0] == expected


@pytest.mark.slow
def test_cached_prefixes_do_not_matter_and_are_found(prompts, expected):
    tokens, client = run(prompts, rounds=2, num_blocks=3000)
    assert tokens == expected
    cached = [client.cached[f"1.{row}"] for row in range(len(prompts))]
    block = client.core.ready.block_size
    assert cached == [(len(prompt) - 1) // block * block for prompt in prompts]
    assert sum(cached) > 100


@pytest.mark.slow
def test_preemption_does_not_matter(prompts, expected):
    tokens, client = run(prompts, num_blocks=64, budget=16)
    assert tokens == expected
    assert client.stats.num_preemptions > 0
