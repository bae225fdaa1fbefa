"""The engine on the GPU writes what the model says, whatever the backend, the graphs, the batch and the chunks."""

import subprocess
import sys

import pytest

from pagemill.catalog.attention import ATTENTION
from pagemill.model.attention.backends.triton_attn import TritonBuilder
from tests.gpu.engines import (
    GRAPH_MODES,
    graph_settings,
    greedy,
    make_llm,
    make_prompts,
    run,
    sampled,
    share_equal,
)

ARCHITECTURES = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
GPU_BACKENDS = [name for name in ATTENTION if "CPU" not in name and "MLA" not in name]
TIES = 0.6
"""Share of requests that must be identical in bfloat16; near ties part the others (their regret is checked)."""
LLAMA = "LlamaForCausalLM"


def test_smoke_one_request(checkpoints):
    prompts = make_prompts(1)
    with make_llm(checkpoints.path(LLAMA)) as llm:
        tokens = run(llm, prompts, greedy(16))
    checkpoints.reference(LLAMA).check(prompts, tokens, "bfloat16")


def test_smoke_without_graphs(checkpoints):
    prompts = make_prompts(4)
    with make_llm(checkpoints.path(LLAMA), enforce_eager=True) as llm:
        tokens = run(llm, prompts, greedy(16))
    checkpoints.reference(LLAMA).check(prompts, tokens, "bfloat16")


NO_CPU_KERNELS = """
import sys
from pagemill.model.kernels import native
from tests.gpu.engines import greedy, make_llm, make_prompts, run

with make_llm(sys.argv[1]) as llm:
    run(llm, make_prompts(2), greedy(4))
sys.exit(native.library.cache_info().misses)
"""


def test_nobody_asks_for_the_cpu_kernels(checkpoints):
    """They would be compiled at the first start."""
    subprocess.run([sys.executable, "-c", NO_CPU_KERNELS, checkpoints.path(LLAMA)], check=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_the_reference(checkpoints, architecture, dtype):
    prompts = make_prompts(24)
    with make_llm(checkpoints.path(architecture), dtype=dtype) as llm:
        tokens = run(llm, prompts, greedy(24))
    checkpoints.reference(architecture).check(prompts, tokens, dtype)


@pytest.mark.parametrize("mode", ["eager", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_every_backend(checkpoints, backend, mode):
    prompts = make_prompts(24, longest=400)
    with make_llm(checkpoints.path(LLAMA), attention_backend=backend, **graph_settings(mode)) as llm:
        tokens = run(llm, prompts, greedy(24))
    checkpoints.reference(LLAMA).check(prompts, tokens, "bfloat16")


@pytest.mark.parametrize("mode", ["eager", "FULL_AND_PIECEWISE"])
def test_a_prefix_that_all_share_is_attended_to_once(checkpoints, monkeypatch, mode):
    shared = [3 + index * index % 251 for index in range(300)]
    prompts = [[*shared, *prompt] for prompt in make_prompts(24, longest=100)]
    prefixes, cascade = [], TritonBuilder._cascade

    def noted(builder, common):
        found = cascade(builder, common)
        prefixes.append(0 if found is None else found.prefix_len)
        return found

    monkeypatch.setattr(TritonBuilder, "_cascade", noted)
    settings = {"attention_backend": "TRITON_ATTN", "disable_cascade_attn": False}
    with make_llm(checkpoints.path(LLAMA), **settings, **graph_settings(mode)) as llm:
        run(llm, prompts[:1], greedy(1))  # the others find its blocks
        prefixes.clear()  # a start tries a cascade of the longest prefix there can be
        tokens = run(llm, prompts, greedy(24))
    assert max(prefixes) == 288
    checkpoints.reference(LLAMA).check(prompts, tokens, "bfloat16")


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_windows_on_every_backend(checkpoints, backend):
    prompts = make_prompts(16)
    with make_llm(checkpoints.path("Gemma3ForCausalLM"), attention_backend=backend) as llm:
        tokens = run(llm, prompts, greedy(24))
    checkpoints.reference("Gemma3ForCausalLM").check(prompts, tokens, "bfloat16")


@pytest.fixture(scope="module")
def eager_tokens(checkpoints):
    """48 requests, greedy and drawn in turn, each kernel launched by itself."""
    with make_llm(checkpoints.path("Qwen3ForCausalLM"), enforce_eager=True) as llm:
        return run(llm, make_prompts(48), mixed_params(48))


def mixed_params(count):
    return [sampled(24, 1000 + index) if index % 2 else greedy(24) for index in range(count)]


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_graphs_equal_eager(checkpoints, eager_tokens, mode):
    prompts = make_prompts(48)
    with make_llm(checkpoints.path("Qwen3ForCausalLM"), **graph_settings(mode)) as llm:
        tokens = run(llm, prompts, mixed_params(48))
    checkpoints.reference("Qwen3ForCausalLM").check(prompts[::2], tokens[::2], "bfloat16")
    assert share_equal(tokens, eager_tokens) >= TIES


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_equals_each_alone(checkpoints, ahead):
    """In float32: one row and many are summed by different kernels, and in bfloat16 that settles near ties."""
    prompts, params = make_prompts(48), mixed_params(48)
    settings = {"dtype": "float32", "async_scheduling": ahead, "enable_prefix_caching": False}
    with make_llm(checkpoints.path("Qwen3ForCausalLM"), **settings) as llm:
        alone = [run(llm, [prompt], [param])[0] for prompt, param in zip(prompts[:16], params[:16], strict=True)]
        together = run(llm, prompts, params)
        again = run(llm, prompts, params)
    assert together == again, "the same batch twice"
    checkpoints.reference("Qwen3ForCausalLM").check(prompts[:16:2], alone[::2], "float32")
    assert share_equal(alone, together[:16]) >= 0.9


def test_chunks_and_a_crowded_cache(checkpoints, eager_tokens):
    prompts = make_prompts(48)
    settings = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 90, "max_model_len": 320}
    with make_llm(checkpoints.path("Qwen3ForCausalLM"), **settings) as llm:
        tokens = run(llm, prompts, mixed_params(48))
        assert llm._engine._client.stats()[0].num_preemptions > 0
    checkpoints.reference("Qwen3ForCausalLM").check(prompts[::2], tokens[::2], "bfloat16")
    assert share_equal(tokens, eager_tokens) >= TIES


def test_a_cache_hit_equals_a_miss(checkpoints):
    prompts = make_prompts(24, longest=300, seed=3)
    with make_llm(checkpoints.path(LLAMA)) as llm:
        missed = run(llm, prompts, greedy(16))
        hit = llm.generate(prompts, greedy(16), use_tqdm=False)
    assert all(output.num_cached_tokens > 0 for output in hit if len(output.prompt_token_ids) > 40)
    tokens = [list(output.outputs[0].token_ids) for output in hit]
    checkpoints.reference(LLAMA).check(prompts, tokens, "bfloat16")
    assert share_equal(missed, tokens) >= TIES


def test_the_gpu_says_what_the_cpu_says(checkpoints):
    prompts = make_prompts(12, longest=60)
    with make_llm(checkpoints.path(LLAMA), dtype="float32") as llm:
        on_gpu = run(llm, prompts, greedy(16))
    with make_llm(checkpoints.path(LLAMA), dtype="float32", device="cpu") as llm:
        on_cpu = run(llm, prompts, greedy(16))
    checkpoints.reference(LLAMA).check(prompts, on_cpu, "float32")
    assert share_equal(on_gpu, on_cpu) >= 0.9


def test_keys_and_values_in_fp8(checkpoints):
    prompts = make_prompts(16)
    with make_llm(checkpoints.path(LLAMA), kv_cache_dtype="fp8", attention_backend="TRITON_ATTN") as llm:
        tokens = run(llm, prompts, greedy(24))
    checkpoints.reference(LLAMA).check(prompts, tokens, "fp8")


def test_a_thousand_requests_at_once(checkpoints):
    prompts = make_prompts(1000, longest=40)
    with make_llm(checkpoints.path(LLAMA), max_num_seqs=1024) as llm:
        tokens = run(llm, prompts, greedy(12))
    assert all(len(each) == 12 for each in tokens)
    checkpoints.reference(LLAMA).check(prompts[::50], tokens[::50], "bfloat16")
