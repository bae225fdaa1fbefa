"""Drafts on a real GPU change no text: greedy, drawn, in batches, chunks and a crowded cache, in graphs and without.

Rows that are verified together are summed by other kernels than a single one, so near ties may part two texts: as
elsewhere, a greedy text is held against transformers, and most requests must be identical.
"""

import pytest

from pagemill import SamplingParams
from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.worker.spec_decode.interface import Speculation
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.scripted_grammar import SOME_PLACES, at_positions, grammar_of
from tests.fakes.toy_proposer import TEXTS, toy_proposer
from tests.gpu.engines import KV_BYTES, graph_settings, greedy, make_llm, make_prompts, run, sampled, share_equal

QWEN = "Qwen3ForCausalLM"
LLAMA = "LlamaForCausalLM"
NUM_DRAFTS = 5
TOY = {"method": "toy", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
TIES = {"float32": 0.9, "bfloat16": 0.6}
"""Share of requests that must be identical."""
MODES = ("eager", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@pytest.fixture(autouse=True)
def toy():
    with toy_proposer():
        yield


def mixed_params(count, num_tokens=24):
    return [sampled(num_tokens, 1000 + index) if index % 2 else greedy(num_tokens) for index in range(count)]


def taught(prompts, outputs):
    """The toy knows these texts from now on."""
    TEXTS[:] = [[*prompt, *tokens] for prompt, tokens in zip(prompts, outputs, strict=True)]


def accepted(llm):
    """Drafts that were right so far."""
    return llm._engine._client.stats()[0].drafts.num_accepted_tokens


@pytest.fixture(scope="module")
def plain_texts(checkpoints):
    """48 requests without drafts, by type."""
    found = {}

    def texts(dtype):
        if dtype not in found:
            with make_llm(checkpoints.path(QWEN), dtype=dtype) as llm:
                found[dtype] = run(llm, make_prompts(48), mixed_params(48))
        return found[dtype]

    return texts


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_texts_are_those_without_drafts(checkpoints, plain_texts, dtype, mode, ahead):
    if not ahead and mode != "FULL_AND_PIECEWISE":
        pytest.skip("one mode is enough")
    prompts = make_prompts(48)
    taught(prompts, plain_texts(dtype))
    settings = {"dtype": dtype, "async_scheduling": ahead, "speculative_config": TOY, **graph_settings(mode)}
    with make_llm(checkpoints.path(QWEN), **settings) as llm:
        tokens = run(llm, prompts, mixed_params(48))
        again = run(llm, prompts[:8], mixed_params(48)[:8])
        assert accepted(llm) > 100
    checkpoints.reference(QWEN).check(prompts[::2], tokens[::2], dtype)
    assert share_equal(tokens, plain_texts(dtype)) >= TIES[dtype]
    assert share_equal(again, tokens[:8]) >= TIES[dtype]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_one_request_and_few(checkpoints, plain_texts, count):
    """Their steps are replays of the smallest graphs."""
    prompts = make_prompts(48)[:count]
    taught(prompts, plain_texts("float32")[:count])
    with make_llm(checkpoints.path(QWEN), dtype="float32", speculative_config=TOY) as llm:
        tokens = [run(llm, [prompt], [param])[0] for prompt, param in zip(prompts, mixed_params(count), strict=True)]
        together = run(llm, prompts, mixed_params(count))
        assert accepted(llm) > 5 * count
    assert tokens == together == plain_texts("float32")[:count]


@pytest.mark.parametrize("proposer", ["toy", "ngram", "suffix"])
def test_chunks_and_a_crowded_cache(checkpoints, plain_texts, proposer):
    prompts = make_prompts(48)
    taught(prompts, plain_texts("float32"))
    settings = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 90, "max_model_len": 320, "dtype": "float32"}
    drafts = {"method": proposer, "num_speculative_tokens": 4}
    with make_llm(checkpoints.path(QWEN), speculative_config=drafts, **settings) as llm:
        tokens = run(llm, prompts, mixed_params(48))
        assert llm._engine._client.stats()[0].num_preemptions > 0
    checkpoints.reference(QWEN).check(prompts[::2], tokens[::2], "float32")
    assert share_equal(tokens, plain_texts("float32")) >= TIES["float32"]


@pytest.mark.parametrize("num_drafts", [1, 2, 7])
def test_other_numbers_of_drafts(checkpoints, plain_texts, num_drafts):
    prompts = make_prompts(16)
    taught(prompts, plain_texts("float32")[:16])
    with make_llm(
        checkpoints.path(QWEN), dtype="float32", speculative_config=TOY | {"num_speculative_tokens": num_drafts}
    ) as llm:
        tokens = run(llm, prompts, mixed_params(16))
        assert accepted(llm) > 16
    assert share_equal(tokens, plain_texts("float32")[:16]) >= TIES["float32"]


def test_a_cache_hit_equals_a_miss(checkpoints):
    prompts = make_prompts(24, longest=300, seed=3)
    with make_llm(checkpoints.path(LLAMA), dtype="float32") as llm:
        plain = run(llm, prompts, greedy(16))
    taught(prompts, plain)
    with make_llm(checkpoints.path(LLAMA), dtype="float32", speculative_config=TOY) as llm:
        missed = run(llm, prompts, greedy(16))
        hit = llm.generate(prompts, greedy(16), use_tqdm=False)
    assert all(output.num_cached_tokens > 0 for output in hit if len(output.prompt_token_ids) > 40)
    tokens = [list(output.outputs[0].token_ids) for output in hit]
    checkpoints.reference(LLAMA).check(prompts, tokens, "float32")
    assert share_equal(missed, plain) >= TIES["float32"]
    assert share_equal(tokens, plain) >= TIES["float32"]


@pytest.mark.parametrize("mode", ["eager", "FULL_AND_PIECEWISE"])
def test_what_changes_logits_sees_the_tokens_before_each_row(checkpoints, mode):
    prompts = make_prompts(12, longest=60)
    params = [
        SamplingParams(
            temperature=0.8 * (index % 2), seed=index, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=32,
            min_tokens=20, stop_token_ids=list(range(3, 259, 2)), bad_words_token_ids=[[5], [8, 9]],
        )
        for index in range(12)
    ]  # fmt: skip
    with make_llm(checkpoints.path(LLAMA), dtype="float32", **graph_settings(mode)) as llm:
        plain = run(llm, prompts, params)
    taught(prompts, plain)
    with make_llm(checkpoints.path(LLAMA), dtype="float32", speculative_config=TOY, **graph_settings(mode)) as llm:
        tokens = run(llm, prompts, params)
        assert accepted(llm) > 30
    assert all(len(each) > 19 for each in tokens)
    assert share_equal(tokens, plain) >= TIES["float32"]


def test_log_probabilities_of_accepted_tokens(checkpoints):
    prompts = make_prompts(8, longest=60)
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprobs=1
    )
    found = []
    for drafts in (None, TOY):
        given = {} if drafts is None else {"speculative_config": drafts}
        with make_llm(checkpoints.path(LLAMA), dtype="float32", **given) as llm:
            found.append(llm.generate(prompts, params, use_tqdm=False))
        taught(prompts, [output.outputs[0].token_ids for output in found[0]])
    equal = 0
    for plain, drafted in zip(*found, strict=True):
        ours, theirs = drafted.outputs[0], plain.outputs[0]
        assert len(ours.logprobs) == len(ours.token_ids)
        if list(ours.token_ids) != list(theirs.token_ids):
            continue
        equal += 1
        for token, here, there in zip(ours.token_ids, ours.logprobs, theirs.logprobs, strict=True):
            assert abs(here[token].logprob - there[token].logprob) < 0.02
    assert equal >= 6


@pytest.mark.parametrize("mode", ["eager", "FULL_AND_PIECEWISE"])
def test_tokens_that_a_form_forces(checkpoints, mode):
    prompts = make_prompts(6, longest=60)
    asked = {"temperature": 0.9, "max_tokens": 24}
    texts = []
    for speculation in (None, Speculation("toy", NUM_DRAFTS, adaptive=False)):
        config = build_config(
            EngineArgs(
                checkpoints.path(LLAMA), device="cuda", dtype="float32", max_num_seqs=8,
                kv_cache_memory_bytes=KV_BYTES, **graph_settings(mode),
            )
        )  # fmt: skip
        worker = Worker(config, speculation=speculation)
        rule = grammar_of(at_positions(SOME_PLACES))
        client = Client(EngineCore(config, UniprocExecutor(worker), grammar_of=rule))
        client.add(*(core_request(str(index), prompt, seed=index, **asked) for index, prompt in enumerate(prompts)))
        client.run()
        client.core.check_integrity()
        stats = client.core.stats()
        client.core.shutdown()
        texts.append([client.tokens[str(index)] for index in range(len(prompts))])
        taught(prompts, texts[0])
    assert all(tokens[5:8] == SOME_PLACES[5] for tokens in texts[1])
    assert share_equal(*texts) >= TIES["float32"]
    assert stats.drafts is not None and stats.drafts.num_accepted_tokens > 0


def test_windows(checkpoints):
    prompts = make_prompts(16)
    with make_llm(checkpoints.path("Gemma3ForCausalLM"), dtype="float32") as llm:
        plain = run(llm, prompts, greedy(32))
    taught(prompts, plain)
    with make_llm(checkpoints.path("Gemma3ForCausalLM"), dtype="float32", speculative_config=TOY) as llm:
        tokens = run(llm, prompts, greedy(32))
        assert accepted(llm) > 50
    checkpoints.reference("Gemma3ForCausalLM").check(prompts, tokens, "float32")
    assert share_equal(tokens, plain) >= TIES["float32"]


def test_an_engine_that_is_told_counts_learns_what_drafts_cost(checkpoints):
    """Adaptive drafts on a GPU: steps are timed from tokens to tokens, and texts stay what they are."""
    prompts = [[7, 8, 9, 10] * 20, [20, 21, 22] * 15]
    with make_llm(checkpoints.path(LLAMA), dtype="float32") as llm:
        plain = run(llm, prompts, greedy(64))
    with make_llm(checkpoints.path(LLAMA), dtype="float32", spec_method="ngram", spec_tokens=5) as llm:
        tokens = run(llm, prompts, greedy(64))
        runner = llm._engine._client._core._executor._worker.runner
        seconds = runner._drafts._adaptive.costs.seconds(1, 2)
    checkpoints.reference(LLAMA).check(prompts, tokens, "float32")
    assert share_equal(tokens, plain) == 1.0
    assert 0 < seconds[0] < 1
