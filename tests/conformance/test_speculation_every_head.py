"""Heads of every kind, and a draft model, change no text, three seeds each: with all that requests may ask for in the
same steps, small chunks, few blocks, cached prefixes, steps in flight, engines that are killed, stop strings, on two
ranks, and over two or three pipeline stages."""

from itertools import product

import numpy as np
import pytest

from pagemill import LLM, SamplingParams
from pagemill.messages.logprobs import joined
from pagemill.messages.structured_outputs import StructuredOutputsParams
from tests.conformance.drafted_runs import run_killed, run_requests
from tests.conformance.test_speculation import ASKED, FORM, requests
from tests.fakes.made_heads import HEADS, OWN_LAYERS, MadeHeads
from tests.fakes.masked_worker import forms, wide_table

pytestmark = pytest.mark.cases(one_in=11)
KINDS = [*HEADS, *OWN_LAYERS]
SEEDS = [0, 1, 2]
CASES = [*product(KINDS, SEEDS, [False]), *((kind, SEEDS[place % 3], True) for place, kind in enumerate(KINDS))]
"""Kind, seed, and whether there are pipeline stages: one seed of each kind, as each case starts processes."""
FEW = 7
"""KV cache blocks with which requests are preempted: the fewest that are allowed."""
MORE = {"qwen3_next_mtp": 9}
"""The same where states lie there too."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model and what its drafts come from, by kind and seed."""
    heads = MadeHeads(tmp_path_factory, lambda folder, kind, seed: HEADS[kind](folder, seed))
    own = {}

    def make(kind, seed):
        asked = {"num_speculative_tokens": 3, "adaptive": False}
        if kind in HEADS:
            target, head = heads(kind, seed)
            return target, asked | {"model": head}
        if (kind, seed) not in own:
            own[kind, seed] = str(OWN_LAYERS[kind](tmp_path_factory.mktemp("tiny") / "model", seed))
        return own[kind, seed], asked | {"method": "mtp"}

    return make


def stages(staged, seed):
    """Settings: of two pipeline stages or three."""
    return {"pipeline_parallel_size": 2 + seed % 2} if staged else {}


@pytest.fixture(scope="module")
def grammar_of():
    return forms({FORM: StructuredOutputsParams(regex="[0-9]{20}")}, wide_table())


@pytest.fixture(scope="module")
def plain(grammar_of):
    """What a model says without drafts, under no special circumstances."""
    found = {}

    def of(target, seed):
        if (target, seed) not in found:
            found[target, seed] = run_requests(target, requests(seed), grammar_of=grammar_of)[0]
        return found[target, seed]

    return of


@pytest.mark.parametrize(("kind", "seed", "staged"), CASES)
def test_speculation_of_all_that_is_asked_for(made, plain, grammar_of, kind, seed, staged):
    """Greedy, sampled, penalised, scored, stopping, with a form."""
    target, asked = made(kind, seed)
    expected = plain(target, seed)
    settings = {"max_num_batched_tokens": 9, "num_gpu_blocks_override": MORE.get(kind, FEW), "depth": 1 + seed % 2}
    settings |= stages(staged, seed)
    found, stats = run_requests(target, requests(seed), speculative_config=asked, grammar_of=grammar_of, **settings)
    assert set(found.tokens) == set(ASKED)
    assert found.tokens == expected.tokens
    assert found.finish == expected.finish
    scores, reference = (joined(client.logprobs["scored"]) for client in (found, expected))
    assert scores.token_ids[:, 0].tolist() == expected.tokens["scored"]
    assert np.abs(scores.values - reference.values).max() < 1e-3
    assert stats.num_preemptions > 0
    assert stats.drafts.num_draft_tokens > 20


@pytest.mark.parametrize(("kind", "seed", "staged"), CASES)
def test_speculation_finds_as_much_cached(made, grammar_of, kind, seed, staged):
    target, asked = made(kind, seed)
    rounds = [[one for one in requests(seed, number) if one.request_id != FORM] for number in range(2)]
    expected, without = run_requests(target, *rounds)
    found, drafted = run_requests(target, *rounds, speculative_config=asked, **stages(staged, seed))
    assert found.tokens == expected.tokens
    assert drafted.prefix_cache_hits == without.prefix_cache_hits > 0


@pytest.mark.parametrize(("kind", "seed", "staged"), CASES)
def test_speculation_goes_on_where_an_engine_was_killed(made, plain, kind, seed, staged):
    target, asked = made(kind, seed)
    wanted = [one for one in requests(seed) if one.request_id != FORM]
    settings = {"depth": 1 + seed % 2, "speculative_config": asked, **stages(staged, seed)}
    found, num_drafts = run_killed(target, wanted, **settings)
    assert found == {name: tokens for name, tokens in plain(target, seed).tokens.items() if name != FORM}
    assert num_drafts > 20


@pytest.mark.parametrize(("kind", "num_stages"), [*product(KINDS, [1]), ("eagle3", 2), ("draft_model", 2)])
def test_speculation_on_two_ranks_and_up_to_stop_strings(made, kind, num_stages):
    target, asked = made(kind, 0)
    settings = {
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 200,
        "cpu_threads": 1,
    }
    prompts = [{"prompt_token_ids": [5 + seed, 6, 7, 40 * seed + 9]} for seed in SEEDS]
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(target, **settings, speculative_config={"method": "none"}) as llm:
        texts = [output.outputs[0].text for output in llm.generate(prompts, greedy, use_tqdm=False)]
        params = [SamplingParams(temperature=0.0, max_tokens=24, stop=[text[9:12]], min_tokens=3) for text in texts]
        expected = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": num_stages}
    with LLM(target, **settings, **ranks, speculative_config=asked) as llm:
        found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
    assert any(one.stop_reason for one in found)
    assert sum(one.num_draft_tokens for one in found) > 0
