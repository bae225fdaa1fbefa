"""The same seed, the same tokens: alone, in a batch of 64, after a preemption, in another engine, and on two workers.
And what `--seed` seeds. Tiny random checkpoint, float32."""

import random

import pytest

from pagemill import LLM, SamplingParams
from tests.fakes.tiny_checkpoint import make_checkpoint

SEEDED = [
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "top_k": 20, "seed": 2**64 - 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": -3},
    {"min_p": 0.05, "seed": 6, "repetition_penalty": 1.2},
    {"temperature": 1.1, "seed": 7, "frequency_penalty": 0.4, "logit_bias": {30: 2.0}},
]
LENGTH = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


def params(count):
    return [SamplingParams(**SEEDED[index % len(SEEDED)], max_tokens=LENGTH, ignore_eos=True) for index in range(count)]


def prompts(count):
    rng = random.Random(1)
    return [[rng.randrange(3, 259) for _ in range(rng.randint(4, 60))] for _ in range(count)]


def tokens_of(llm, batch, sampling):
    return [output.outputs[0].token_ids for output in llm.generate(batch, sampling, use_tqdm=False)]


def engine(checkpoint, **settings):
    return LLM(checkpoint, dtype="float32", cpu_threads=1, **({"max_num_seqs": 64, "max_model_len": 128} | settings))


@pytest.fixture(scope="module")
def alone(checkpoint):
    with engine(checkpoint, enable_prefix_caching=False) as llm:
        return [tokens_of(llm, [one], [how])[0] for one, how in zip(prompts(64), params(64), strict=True)]


def test_in_a_batch_of_64_and_in_another_engine(checkpoint, alone):
    with engine(checkpoint) as llm:
        assert tokens_of(llm, prompts(64), params(64)) == alone


def test_after_preemptions(checkpoint, alone):
    with engine(checkpoint, num_gpu_blocks_override=64) as llm:
        assert tokens_of(llm, prompts(64), params(64)) == alone
        assert llm._engine._client.stats()[0].num_preemptions > 0


@pytest.mark.slow
def test_on_two_workers(checkpoint, alone):
    with engine(checkpoint, tensor_parallel_size=2) as llm:
        assert tokens_of(llm, prompts(64), params(64)) == alone


def test_completions_of_one_request_differ_and_repeat(checkpoint):
    many = SamplingParams(temperature=1.0, seed=9, n=8, max_tokens=LENGTH, ignore_eos=True)
    with engine(checkpoint) as llm:
        (first,), (again,) = (llm.generate([prompts(1)[0] * 3], many, use_tqdm=False) for _ in range(2))
        single = tokens_of(llm, [prompts(1)[0] * 3], many.replace(n=1))[0]
    texts = [completion.token_ids for completion in first.outputs]
    assert len({*map(tuple, texts)}) == 8
    assert texts == [completion.token_ids for completion in again.outputs]
    assert texts[0] == single


def test_children_share_the_blocks_of_their_prompt(checkpoint):
    prompt = [3 + index % 250 for index in range(64)]
    many = SamplingParams(temperature=1.0, seed=9, n=6, max_tokens=2, ignore_eos=True)
    with engine(checkpoint, max_num_batched_tokens=64, disable_log_stats=False) as llm:
        llm.generate([prompt], many, use_tqdm=False)
        hits = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")
    assert hits >= 5 * 48  # all blocks of 16 but the last, whose last token is computed, of five children


def unseeded(checkpoint, seed):
    with engine(checkpoint, seed=seed) as llm:
        return tokens_of(llm, prompts(6), [SamplingParams(max_tokens=LENGTH, ignore_eos=True)] * 6)


def test_the_setting_seeds_requests_without_one(checkpoint):
    first = unseeded(checkpoint, 5)
    assert unseeded(checkpoint, 5) == first
    other = unseeded(checkpoint, 6)
    assert all(one != another for one, another in zip(first, other, strict=True))
    assert len({*map(tuple, first)}) == 6
