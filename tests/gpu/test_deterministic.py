"""`--deterministic` on the GPU: bits of tokens and log-probabilities do not depend on what runs beside a request."""

import copy
import dataclasses

import msgspec
import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.model.attention.backends.triton_invariant import FEW_STAGES, InvariantTritonBackend
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.kernels import ops, reference
from tests.fakes.paged_attention import PagedCase
from tests.fakes.toy_proposer import TEXTS, toy_proposer
from tests.gpu.engines import graph_settings, greedy, make_llm, make_prompts, need_gpus, run, sampled

ARCHITECTURE = "Qwen3ForCausalLM"
EXPERTS = "Qwen3MoeForCausalLM"
LLAMA = "LlamaForCausalLM"
TOY = {"method": "toy", "num_speculative_tokens": 5, "adaptive": False}
NUM_TOKENS = 24
COUNT = 256


def prompts_of(count):
    """Of up to 700 tokens; the first of them are long."""
    return [*make_prompts(4, longest=700, seed=2), *make_prompts(count - 4, longest=100)]


def params_of(count):
    """Greedy and drawn in turn, some with the log-probabilities of candidates."""
    found = [sampled(NUM_TOKENS, 1000 + index) if index % 2 else greedy(NUM_TOKENS) for index in range(count)]
    return [msgspec.structs.replace(each, logprobs=3) if index % 4 < 2 else each for index, each in enumerate(found)]


def bits_of(llm, prompts, params):
    """Of each request: its tokens, and candidates and their log-probabilities as they are."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(list(output.token_ids), *map(candidates, output.logprobs or ())) for output in outputs]


def candidates(logprobs):
    return [(token, value.logprob) for token, value in logprobs.items()]


def make(checkpoints, architecture=ARCHITECTURE, **settings):
    defaults = {"deterministic": True, "max_num_seqs": COUNT}
    return make_llm(checkpoints.path(architecture), **(defaults | settings))


@pytest.fixture(scope="module")
def alone(checkpoints):
    """What each request gives by itself, each kernel launched by itself, no prefix cached."""
    prompts, params = prompts_of(COUNT), params_of(COUNT)
    chosen = range(0, COUNT, 9)
    with make(checkpoints, enforce_eager=True, enable_prefix_caching=False) as llm:
        return {index: bits_of(llm, [prompts[index]], [params[index]])[0] for index in chosen}


def differing(expected, found):
    """Requests of other bits, and the first two parts of them that differ."""
    return {
        index: [pair for pair in zip(bits, found[index], strict=True) if pair[0] != pair[1]][:2]
        for index, bits in expected.items()
        if found[index] != bits
    }


@pytest.mark.parametrize("mode", ["eager", "FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("count", [64, COUNT])
def test_in_a_batch(checkpoints, alone, mode, count):
    """The second time, prompts are found in the prefix cache."""
    prompts, params = prompts_of(COUNT)[:count], params_of(COUNT)[:count]
    expected = {index: bits for index, bits in alone.items() if index < count}
    with make(checkpoints, **graph_settings(mode)) as llm:
        for _ in range(2):
            assert differing(expected, bits_of(llm, prompts, params)) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 64, "max_num_seqs": 16},
        {"max_num_batched_tokens": 333},
        {"kv_cache_memory_bytes": 3 << 20, "max_num_seqs": 32},
    ],
    ids=["chunks", "uneven chunks", "preemption"],
)
def test_however_it_is_cut(checkpoints, alone, settings):
    """In reverse, so that other requests come first."""
    prompts, params = prompts_of(COUNT), params_of(COUNT)
    with make(checkpoints, **settings) as llm:
        found = bits_of(llm, prompts[::-1], params[::-1])[::-1]
    assert differing(alone, found) == {}


def test_tokens_are_those_of_the_reference(checkpoints):
    prompts = make_prompts(24)
    with make(checkpoints) as llm:
        tokens = run(llm, prompts, greedy(24))
    checkpoints.reference(ARCHITECTURE).check(prompts, tokens, "bfloat16")


@pytest.mark.parametrize(("architecture", "num_ranks"), [(LLAMA, 1), (EXPERTS, 1), (ARCHITECTURE, 2), (EXPERTS, 2)])
def test_other_models_and_two_ranks(checkpoints, architecture, num_ranks):
    """Alone and eager; in a batch with graphs, twice; in chunks."""
    need_gpus(num_ranks)
    prompts, params = prompts_of(64), params_of(64)
    settings = {"architecture": architecture, "tensor_parallel_size": num_ranks}
    with make(checkpoints, enforce_eager=True, enable_prefix_caching=False, **settings) as llm:
        expected = {index: bits_of(llm, [prompts[index]], [params[index]])[0] for index in range(0, 64, 5)}
    for others in ({}, {"max_num_batched_tokens": 64, "max_num_seqs": 16}):
        with make(checkpoints, **settings, **others) as llm:
            for _ in range(2):
                assert differing(expected, bits_of(llm, prompts, params)) == {}


@pytest.mark.parametrize("mode", ["eager", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("architecture", [ARCHITECTURE, LLAMA])
def test_with_drafts(checkpoints, architecture, mode):
    """Those of a proposer that knows the texts of all requests but every third, and what is wrong for those."""
    prompts, params = prompts_of(32), params_of(32)
    with make(checkpoints, architecture=architecture, enforce_eager=True, enable_prefix_caching=False) as llm:
        expected = {index: bits_of(llm, [prompts[index]], [params[index]])[0] for index in range(32)}
    TEXTS[:] = [
        [*prompt, *(tokens if index % 3 else tokens[:7] + tokens[::-1])]
        for (index, (tokens, *_)), prompt in zip(expected.items(), prompts, strict=True)
    ]
    settings = {"architecture": architecture, "speculative_config": TOY, **graph_settings(mode)}
    with toy_proposer(), make(checkpoints, **settings) as llm:
        for _ in range(2):
            assert differing(expected, bits_of(llm, prompts, params)) == {}
        assert llm._engine._client.stats()[0].drafts.num_accepted_tokens > 100


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "DeepseekV2ForCausalLM"])
def test_what_is_not_covered_is_refused(checkpoints, architecture):
    with pytest.raises(ConfigError, match=r"deterministic"):
        make_llm(checkpoints.path(architecture), deterministic=True)


@pytest.mark.parametrize(
    ("outputs", "inputs", "gate", "dtype", "out_dtype"),
    [
        (6144, 4096, None, torch.bfloat16, None), (4096, 12288, None, torch.bfloat16, torch.float32),
        (12288, 4096, "silu", torch.bfloat16, None), (2048, 2048, None, torch.float16, None),
        (1000, 1048, "gelu_tanh", torch.float16, None), (40, 72, None, torch.bfloat16, None),
        (8, 2048, None, torch.bfloat16, torch.float32),
    ],
)  # fmt: skip
def test_rows_of_products(outputs, inputs, gate, dtype, out_dtype):
    """Of up to 16 rows, which have a kernel of their own, and among more."""
    generator = torch.Generator("cuda").manual_seed(0)
    noise = lambda *shape: torch.randn(shape, generator=generator, device="cuda").to(dtype)  # noqa: E731
    x, weight = noise(150, inputs), noise(outputs * (2 if gate else 1), inputs) / inputs**0.5
    bias = noise(len(weight)) if outputs < inputs else None
    whole = ops.invariant_linear(x, weight, bias, gate, out_dtype)
    for rows in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17):
        found = ops.invariant_linear(x[:rows], weight, bias, gate, out_dtype)
        assert torch.equal(found, whole[:rows]), rows
    expected = reference.linear(x.float(), weight.float(), None if bias is None else bias.float(), gate)
    torch.testing.assert_close(whole.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype"),
    [(32, 8, 128, torch.bfloat16), (16, 8, 80, torch.float16), (32, 1, 64, torch.bfloat16)],
)
def test_tokens_that_decode(heads, kv_heads, size, dtype):
    """Alone, and among so many that another kernel takes them."""
    spec = AttentionLayerSpec(heads, kv_heads, size, size**-0.5)
    lengths = [1, 16, 63, 64, 65, 255, 256, 257, 700, 4096, 4097, 9000]
    case = PagedCase(spec, [(1, length) for length in lengths], dtype=dtype, device="cuda")
    found = case.run(InvariantTritonBackend)
    torch.testing.assert_close(found.double(), case.expected(), rtol=2e-2, atol=2e-2)
    repeated = torch.arange(max(FEW_STAGES) // kv_heads + len(lengths), device="cuda") % len(lengths)
    whole = run_of(case, repeated)
    assert torch.equal(whole[: len(lengths)], found)
    for most in FEW_STAGES:
        count = max(1, most // kv_heads)
        assert torch.equal(run_of(case, repeated[:count]), whole[:count]), count


def run_of(case, chosen):
    """What the requests `chosen` give, one token each, some more than once."""
    step = case.common()
    common = dataclasses.replace(
        step, query_start=torch.arange(len(chosen) + 1, dtype=torch.int32, device="cuda"),
        seq_lens=step.seq_lens[chosen], block_table=step.block_table[chosen], slot_mapping=step.slot_mapping[chosen],
        num_requests=len(chosen), num_tokens=len(chosen), query_start_host=None, seq_lens_host=None,
    )  # fmt: skip
    found = copy.copy(case)
    found.query, found.key, found.value = case.query[chosen], case.key[chosen], case.value[chosen]
    found.common = lambda: common
    return found.run(InvariantTritonBackend)
