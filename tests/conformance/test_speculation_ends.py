"""Drafts change no text where an engine ends in the middle, on two ranks, with stop strings inside a draft, and with
several completions of a prompt; that a proposer is never right is said once."""

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from pagemill import LLM, SamplingParams
from pagemill.worker.spec_decode.interface import Speculation
from tests.conformance.drafted_runs import run_killed, run_requests
from tests.fakes.engine_setup import core_request
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import TEXTS, toy_proposer

SEEDS = [0, 1, 2]
MODELS = ["LlamaForCausalLM", "Gemma3ForCausalLM"]
ASKED = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 5},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 6},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(make_checkpoint(tmp_path_factory.mktemp("tiny"), name)) for name in MODELS}


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    with toy_proposer():
        yield


def prompt_of(seed: int) -> list[int]:
    some: list[int] = np.random.default_rng(seed).integers(4, 300, 6).tolist()
    return some * 3


@pytest.mark.parametrize("proposer", ["ngram", "right", "random"])
@pytest.mark.parametrize("seed", SEEDS)
def test_another_engine_goes_on_where_one_was_killed(checkpoints: dict[str, str], seed: int, proposer: str) -> None:
    """What the front end remembers is all that the next engine is told."""
    checkpoint = checkpoints[MODELS[seed % 2]]
    asked = [core_request(name, prompt_of(seed), max_tokens=26, **params) for name, params in ASKED.items()]
    expected, _ = run_requests(checkpoint, asked)
    TEXTS[:] = [[*prompt_of(seed), *tokens] for tokens in expected.tokens.values()]
    speculation = Speculation(proposer, 3, adaptive=False)
    found, num_drafts = run_killed(checkpoint, asked, speculation, depth=1 + seed % 2)
    assert found == expected.tokens
    assert num_drafts


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_stop_strings_and_several_completions(checkpoints: dict[str, str], model: str) -> None:
    settings = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 6,
        "num_gpu_blocks_override": 200,
        "cpu_threads": 1,
    }
    prompts = [{"prompt_token_ids": prompt_of(seed)} for seed in SEEDS]
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    several = SamplingParams(temperature=0.8, n=3, seed=11, max_tokens=30)
    with LLM(checkpoints[model], **settings, speculative_config={"method": "none"}) as llm:
        plain = llm.generate(prompts, greedy, use_tqdm=False)
        texts = [output.outputs[0].text for output in plain]
        stops = [SamplingParams(temperature=0.0, max_tokens=40, stop=[text[20:23]], min_tokens=3) for text in texts]
        params = [several, *stops]
        jobs = [prompts[0], *prompts]
        expected = llm.generate(jobs, params, use_tqdm=False)
    for size in (1, 2):
        with LLM(checkpoints[model], **settings, tensor_parallel_size=size, speculative_config=NGRAM) as llm:
            found = [*llm.generate(prompts, greedy, use_tqdm=False), *llm.generate(jobs, params, use_tqdm=False)]
        for ours, theirs in zip(found, [*plain, *expected], strict=True):
            for one, other in zip(ours.outputs, theirs.outputs, strict=True):
                assert (one.token_ids, one.text) == (other.token_ids, other.text), size
                assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        completions = [completion for output in found for completion in output.outputs]
        assert sum(one.num_accepted_tokens for one in completions) > 0
        assert all(one.num_accepted_tokens <= min(one.num_draft_tokens, len(one.token_ids)) for one in completions)
        assert any(one.finish_reason == "stop" and one.stop_reason for one in completions)


def test_a_proposer_that_is_never_right_is_told_of_once(
    checkpoints: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    asked = [core_request(str(seed), prompt_of(seed), max_tokens=70, temperature=1.0, seed=seed) for seed in range(16)]
    with caplog.at_level(logging.INFO, logger="pagemill"):
        run_requests(checkpoints[MODELS[0]], asked, speculation=Speculation("four", 4))
    said = [record.getMessage() for record in caplog.records if "what the model samples" in record.getMessage()]
    assert len(said) == 1, said
