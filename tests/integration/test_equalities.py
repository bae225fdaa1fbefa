"""One request gives one answer, whatever happens around it: batch, chunks, preemption, cache. In float32.

Models are tiny random checkpoints, one with full attention and one with sliding windows.
"""

import random

import msgspec
import pytest

from pagemill import LLM, SamplingParams
from pagemill.errors import ConfigError
from pagemill.model.kernels.native import library
from tests.fakes.tiny_checkpoint import make_checkpoint

ARCHITECTURES = ["LlamaForCausalLM", "Gemma3ForCausalLM"]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), request.param))


def prompts(count: int, longest: int = 120, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 259) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def params(count: int) -> list[SamplingParams]:
    """Greedy and seeded requests, mixed.

    A float32 matrix product of one row may differ in its last bit from that of many, so a draw that lands within that
    bit of the border between two tokens may fall to either side. None of these seeds does.
    """
    return [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        if index % 2
        else SamplingParams(temperature=0.9, top_p=0.95, seed=1000 + index, max_tokens=24, ignore_eos=True)
        for index in range(count)
    ]


def run(checkpoint: str, batch: list[list[int]], sampling: list[SamplingParams], one_by_one=False, **settings):
    with LLM(checkpoint, dtype="float32", **({"max_num_seqs": 32} | settings)) as llm:
        if one_by_one:
            outputs = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(batch, sampling, strict=True)]
        else:
            outputs = llm.generate(batch, sampling, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == batch
    return [output.outputs[0].token_ids for output in outputs], outputs


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Each of 32 requests by itself, without a prefix cache."""
    batch = prompts(32)
    tokens, _ = run(checkpoint, batch, params(32), one_by_one=True, enable_prefix_caching=False)
    assert all(len(row) == 24 for row in tokens)
    return tokens


def test_a_batch_of_32_mixed_lengths_equals_each_alone(checkpoint, alone):
    assert run(checkpoint, prompts(32), params(32))[0] == alone


def test_chunked_prefill_equals_whole(checkpoint, alone):
    tokens, _ = run(checkpoint, prompts(32), params(32), max_num_batched_tokens=16, max_num_seqs=12)
    assert tokens == alone


def test_scheduling_ahead_of_the_tokens_equals_waiting_for_them(checkpoint, alone):
    assert run(checkpoint, prompts(32), params(32), async_scheduling=True)[0] == alone
    assert run(checkpoint, prompts(32), params(32), async_scheduling=True, max_num_batched_tokens=16)[0] == alone


def test_preempted_requests_equal_undisturbed_ones(checkpoint, alone):
    few_blocks = {"max_num_seqs": 32, "max_model_len": 160, "num_gpu_blocks_override": 64}
    for ahead in (False, True):
        with LLM(checkpoint, dtype="float32", async_scheduling=ahead, **few_blocks) as llm:
            outputs = llm.generate(prompts(32), params(32), use_tqdm=False)
            assert llm._engine._client.stats()[0].num_preemptions > 0
        assert [output.outputs[0].token_ids for output in outputs] == alone


def test_window_layers_kept_like_full_ones_equal_windows(checkpoint, alone):
    """Every layer keeps every token; attention looks no further back than before."""
    assert run(checkpoint, prompts(32), params(32), disable_hybrid_kv_cache_manager=True)[0] == alone


def test_windows_fit_where_all_tokens_do_not(tmp_path):
    """Gemma 3, three layers of four with a window of 24: 200 kB hold 512 tokens, or do not."""
    path = str(make_checkpoint(tmp_path, "Gemma3ForCausalLM"))
    memory = {"kv_cache_memory_bytes": 200_000, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    assert len(run(path, prompts(2), params(2), **memory)[0]) == 2
    with pytest.raises(ConfigError, match=r"max_model_len=512 needs 33 KV cache blocks .*; use --max-model-len 176"):
        run(path, prompts(2), params(2), disable_hybrid_kv_cache_manager=True, **memory)


def test_a_cache_hit_equals_a_miss(checkpoint, alone):
    batch = prompts(32)
    with LLM(checkpoint, dtype="float32", max_num_seqs=32) as llm:
        first = llm.generate(batch, params(32), use_tqdm=False)
        second = llm.generate(batch, params(32), use_tqdm=False)
        assert llm.reset_prefix_cache()
        third = llm.generate(batch[:1], params(1), use_tqdm=False)
    for outputs in (first, second):
        assert [output.outputs[0].token_ids for output in outputs] == alone
    long = [output for output in second if len(output.prompt_token_ids) > 40]
    assert all(output.num_cached_tokens > 0 for output in long)
    assert all(output.num_cached_tokens < len(output.prompt_token_ids) for output in second)
    assert third[0].num_cached_tokens == 0


def test_a_cache_of_integers_changes_with_nothing_either(checkpoint):
    """In bfloat16, where native layers give a row the same bits in any company: a last bit that differs before keys and
    values are rounded would be a whole step after it."""
    if (kernels := library()) is None or kernels.isa() == b"portable":
        pytest.skip("this machine has no native layers")
    batch, sampling, settings = prompts(32), params(32), {"dtype": "bfloat16", "kv_cache_dtype": "int8"}
    with LLM(checkpoint, enable_prefix_caching=False, **settings) as llm:
        apart = [
            llm.generate(*one, use_tqdm=False)[0].outputs[0].token_ids for one in zip(batch, sampling, strict=True)
        ]
    with LLM(checkpoint, max_num_seqs=32, max_num_batched_tokens=64, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(batch, sampling, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == apart
        assert any(output.num_cached_tokens for output in outputs)
    with LLM(checkpoint, max_num_seqs=32, max_model_len=160, num_gpu_blocks_override=64, **settings) as llm:
        outputs = llm.generate(batch, sampling, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == apart
        assert llm._engine._client.stats()[0].num_preemptions > 0


@pytest.mark.parametrize(("architecture", "num_ranks"), [
    ("LlamaForCausalLM", 1), ("Gemma3ForCausalLM", 1), ("Qwen3MoeForCausalLM", 1), ("LlamaForCausalLM", 2),
])  # fmt: skip
def test_deterministic_outputs_have_the_same_bits_in_any_company(tmp_path, architecture, num_ranks):
    """Log-probabilities too; without the prefix cache and alone, in chunks and found in the cache, and preempted."""
    if (kernels := library()) is None or kernels.isa() == b"portable":
        pytest.skip("this machine has no native layers")
    checkpoint = str(make_checkpoint(tmp_path, architecture))
    batch = prompts(24)
    sampling = [msgspec.structs.replace(each, logprobs=2) for each in params(24)]
    settings = {
        "dtype": "bfloat16", "deterministic": True, "max_num_seqs": 24, "tensor_parallel_size": num_ranks,
    }  # fmt: skip

    def bits(output):
        first = output.outputs[0]
        return first.token_ids, [[(token, one.logprob) for token, one in each.items()] for each in first.logprobs]

    with LLM(checkpoint, enable_prefix_caching=False, **settings) as llm:
        apart = [bits(llm.generate(*one, use_tqdm=False)[0]) for one in zip(batch, sampling, strict=True)]
    with LLM(checkpoint, max_num_batched_tokens=64, **settings) as llm:
        for _ in range(2):
            found = llm.generate(batch[::-1], sampling[::-1], use_tqdm=False)[::-1]
            assert [bits(output) for output in found] == apart
    with LLM(checkpoint, max_model_len=160, num_gpu_blocks_override=48, **settings) as llm:
        assert [bits(output) for output in llm.generate(batch, sampling, use_tqdm=False)] == apart
        assert llm._engine._client.stats()[0].num_preemptions > 0


def test_shared_prefixes_within_one_batch_equal_unshared(checkpoint):
    head = prompts(1, seed=5)[0] * 3
    batch = [head[:100] + tail for tail in prompts(8, longest=20, seed=6)]
    apart, _ = run(checkpoint, batch, params(8), one_by_one=True, enable_prefix_caching=False)
    assert run(checkpoint, batch, params(8))[0] == apart


def branching(seed: int) -> list[list[int]]:
    """Prompts that leave each other at any place in a block, the sliding window included."""
    head = prompts(1, seed=seed)[0] * 3
    return [head[:cut] + tail for cut, tail in zip((5, 21, 47, 47, 63, 78, 90, 101), prompts(8, 12, 6), strict=True)]


@pytest.mark.parametrize("ahead", [False, True])
def test_prefixes_reused_to_the_token_equal_unshared(checkpoint, ahead):
    batch = branching(5)
    apart, _ = run(checkpoint, batch, params(8), one_by_one=True, enable_prefix_caching=False)
    blocks, with_blocks = run(checkpoint, batch, params(8), one_by_one=True)
    tokens, to_the_token = run(
        checkpoint, batch, params(8), one_by_one=True, enable_partial_block_reuse=True, async_scheduling=ahead
    )
    assert tokens == blocks == apart
    assert [output.num_cached_tokens for output in with_blocks] == [0, 0, 16, 32, 32, 48, 64, 80]
    assert [output.num_cached_tokens for output in to_the_token] == [0, 5, 21, 47, 47, 63, 78, 90]


def test_conversations_reused_to_the_token_equal_unshared(checkpoint):
    """Turns of several conversations at once, in a pool that holds some of them."""
    few_blocks = {"max_num_seqs": 32, "max_model_len": 200, "num_gpu_blocks_override": 70}
    cached = {}
    told = {}
    for reuse in (False, True):
        settings = {"enable_partial_block_reuse": True} if reuse else {"enable_prefix_caching": False}
        with LLM(checkpoint, dtype="float32", **few_blocks, **settings) as llm:
            said = branching(7)
            outputs = []
            for turn in range(3):
                outputs = llm.generate(said, params(8), use_tqdm=False)
                own = prompts(8, 5, turn)
                said = [
                    [*before, *output.outputs[0].token_ids[: 7 + turn], *new]
                    for before, output, new in zip(said, outputs, own, strict=True)
                ]
        told[reuse] = said
        cached[reuse] = [output.num_cached_tokens for output in outputs]
    assert told[True] == told[False]
    assert any(count % 16 for count in cached[True])
    assert not any(cached[False])
