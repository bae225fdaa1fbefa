"""Attention on a GPU: every backend that is here against the definition, alone and in captured graphs."""

import dataclasses
import itertools

import pytest
import torch

from pagemill.model.attention.backends.flash_attn import _with_provider
from pagemill.model.attention.backends.flashinfer import FlashInferBackend
from pagemill.model.attention.backends.flex import FlexBackend
from pagemill.model.attention.backends.triton_attn import TritonBackend
from pagemill.model.attention.capability import AttentionContext, AttentionLayerSpec
from pagemill.model.attention.flash_providers import providers
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import BatchLens
from pagemill.model.kernels.triton import launch
from tests.fakes.paged_attention import PagedCase

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
CUDA = torch.cuda.is_available()
COMPUTE = torch.cuda.get_device_capability() if CUDA else None
BATCHES = {
    "decodes": [(1, 1), (1, 37), (1, 64), (1, 330), (1, 5000)],
    "prefills": [(300, 300), (3, 3), (16, 16), (1000, 1000)],
    "mixed": [(16, 80), (1, 33), (5, 5), (133, 1290), (1, 2000), (2, 700)],
}
SHAPES = [(4, 1, 64), (32, 8, 128), (3, 3, 96), (16, 2, 128), (8, 1, 256)]
TRAITS = [
    {}, {"window": 100}, {"chunk_size": 128}, {"soft_cap": 8.0}, {"has_sinks": True},
    {"alibi_slopes": tuple(2.0 ** -(i + 1) for i in range(8))}, {"window": 33, "soft_cap": 30.0, "has_sinks": True},
]  # fmt: skip


def backends():
    found = [("TRITON_ATTN", TritonBackend)]
    if CUDA:
        for provider in providers(COMPUTE):
            if 16 % provider.block_multiple == 0:
                found.append((f"FLASH_ATTN-{provider.version}-{provider.name}", _with_provider(provider, COMPUTE)))
        if not FlashInferBackend.unsupported(AttentionLayerSpec(8, 8, 128, 1.0), "cuda", "bfloat16"):
            found.append(("FLASHINFER", FlashInferBackend))
    return found


BACKENDS = backends()
each_backend = pytest.mark.parametrize("backend", [one for _, one in BACKENDS], ids=[name for name, _ in BACKENDS])
each_in_any_graph = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(one, id=name)
        for name, one in BACKENDS
        if one.metadata_builder.graph_support is AttentionCGSupport.ALWAYS
    ],
)


def skip_unless_able(backend, spec, dtype="bfloat16"):
    reasons = backend.unsupported(spec, "cuda", dtype, AttentionContext(COMPUTE, block_size=16))
    if reasons:
        pytest.skip(", ".join(reasons))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    result, expected = result.double(), expected.double()
    return float((result - expected).norm() / expected.norm())


@each_backend
@pytest.mark.parametrize(("batch", "shape"), list(itertools.product(BATCHES, SHAPES)))
def test_sizes(backend, batch, shape):
    spec = AttentionLayerSpec(*shape, shape[2] ** -0.5)
    skip_unless_able(backend, spec)
    case = PagedCase(spec, BATCHES[batch], dtype=torch.bfloat16, device="cuda")
    assert relative_error(case.run(backend), case.expected()) < 1e-2


@each_backend
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("traits", TRAITS, ids=lambda traits: "-".join(traits) or "plain")
def test_traits(backend, batch, traits):
    spec = AttentionLayerSpec(8, 2, 64, 0.125, **traits)
    skip_unless_able(backend, spec)
    case = PagedCase(spec, BATCHES[batch], dtype=torch.bfloat16, device="cuda")
    if backend is FlashInferBackend:
        case.null_value = 0.0  # before a window it multiplies values with weight zero; an engine's null block is zeros
    assert relative_error(case.run(backend), case.expected()) < 1e-2


@pytest.mark.parametrize("traits", TRAITS, ids=lambda traits: "-".join(traits) or "plain")
def test_flex_attention(traits):
    spec = AttentionLayerSpec(8, 2, 64, 0.125, **traits)
    case = PagedCase(spec, BATCHES["mixed"][:3], dtype=torch.bfloat16, device="cuda")
    assert relative_error(case.run(FlexBackend), case.expected()) < 1e-2


@pytest.mark.parametrize("batch", BATCHES)
def test_float32_is_exact(batch):
    case = PagedCase(AttentionLayerSpec(8, 2, 64, 0.125), BATCHES[batch], device="cuda")
    assert relative_error(case.run(TritonBackend), case.expected()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("batch", BATCHES)
def test_one_byte_cache(batch, dtype):
    case = PagedCase(
        AttentionLayerSpec(32, 8, 128, 128**-0.5), BATCHES[batch], dtype=torch.bfloat16, device="cuda",
        cache_dtype=dtype,
    )  # fmt: skip
    assert relative_error(case.run(TritonBackend), case.expected()) < 1e-2


@pytest.mark.parametrize("dependent", [False, True])
def test_a_graph_follows_lengths_that_change(dependent):
    """Captured with the plan inside, as decode steps are; then lengths and tables change in place."""
    if dependent and (COMPUTE is None or COMPUTE < (9, 0)):
        pytest.skip("dependent launch needs compute capability 9.0")
    spec = AttentionLayerSpec(32, 8, 128, 128**-0.5)
    small = PagedCase(spec, [(1, 1)] * 6, dtype=torch.bfloat16, device="cuda")
    lengths = [(1, n) for n in (4000, 17, 900, 1, 64, 2500)]
    large = PagedCase(spec, lengths, dtype=torch.bfloat16, device="cuda", seed=1)
    common, cache = large.common(), large.cache(TritonBackend)
    common.seq_lens.copy_(small.common().seq_lens)
    impl, builder = TritonBackend.impl(spec), TritonBackend.metadata_builder(spec, torch.device("cuda"))
    launch.set_dependent(dependent)
    try:
        impl.forward(large.query, large.key, large.value, cache, builder.build(common))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = impl.forward(large.query, large.key, large.value, cache, builder.build(common))
    finally:
        launch.set_dependent(False)
    common.seq_lens.copy_(large.common().seq_lens)
    for _ in range(3):
        result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(result, large.expected()) < 1e-2


@each_in_any_graph
@pytest.mark.parametrize("shape", [(512, 16), (512, 128)])
@pytest.mark.parametrize("dependent", [False, True])
def test_a_graph_of_mixed_steps_follows_them(backend, shape, dependent):
    """Captured for a shape while every request decodes; then it is replayed for prompts among decodes, padded."""
    if dependent and (COMPUTE is None or COMPUTE < (9, 0)):
        pytest.skip("dependent launch needs compute capability 9.0")
    spec = AttentionLayerSpec(32, 8, 128, 128**-0.5)
    case = PagedCase(spec, BATCHES["mixed"], dtype=torch.bfloat16, device="cuda")
    step = case.padded(*shape)
    common, cache = step.common(), step.cache(backend)
    start, seq_lens = common.query_start.clone(), common.seq_lens.clone()
    common.query_start.copy_(torch.arange(shape[1] + 1))
    common.seq_lens.fill_(1)
    impl, builder = backend.impl(spec), backend.metadata_builder(spec, torch.device("cuda"))
    launch.set_dependent(dependent)
    try:
        impl.forward(step.query, step.key, step.value, cache, builder.build(common))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = impl.forward(step.query, step.key, step.value, cache, builder.build(common))
    finally:
        launch.set_dependent(False)
    common.query_start.copy_(start)
    common.seq_lens.copy_(seq_lens)
    expected = case.expected()
    for _ in range(3):
        result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(result[: len(expected)], expected) < 1e-2


@pytest.mark.parametrize("traits", TRAITS, ids=lambda traits: "-".join(traits) or "plain")
@pytest.mark.parametrize("batch", BATCHES)
def test_rows_that_are_asked_for(batch, traits):
    """The last ones of requests: they have the bits that they have among all rows."""
    spec = AttentionLayerSpec(8, 2, 64, 0.125, **traits)
    case = PagedCase(spec, BATCHES[batch], dtype=torch.bfloat16, device="cuda")
    cache, impl = case.cache(TritonBackend), TritonBackend.impl(spec)
    impl.tensors.sinks = case.sinks
    common = dataclasses.replace(case.common(), asks_for_ends=True)
    plan = TritonBackend.metadata_builder(spec, torch.device("cuda")).build(common)
    rows = common.query_start[1:].long() - 1
    everything = impl.forward(case.query, case.key, case.value, cache, plan)
    asked = impl.forward(case.query, case.key, case.value, cache, impl.for_asked_rows(plan))
    assert torch.equal(asked[rows], everything[rows])
    assert relative_error(asked[rows], case.expected()[rows]) < 1e-2


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [8, 6])
def test_key_heads_one_after_the_other(size, kv_heads):
    """Keys that the L2 cache does not hold: a part of the heads at once; again and again with one plan."""
    spec = AttentionLayerSpec(2 * kv_heads, kv_heads, size, size**-0.5)
    case = PagedCase(spec, [(700, 9000), (40, 9000)], dtype=torch.bfloat16, device="cuda")
    common = case.common()
    lens = BatchLens(common.query_start.cpu().numpy(), common.seq_lens.cpu().numpy())
    builder = TritonBackend.metadata_builder(spec, torch.device("cuda"))
    plan = builder.build(dataclasses.replace(common, batch_lens=lens))
    whole = builder.build(common)
    cache, impl = case.cache(TritonBackend), TritonBackend.impl(spec)
    expected = impl.forward(case.query, case.key, case.value, cache, whole)
    assert relative_error(expected, case.expected()) < 1e-2
    builder.build(dataclasses.replace(common, batch_lens=lens))
    for _ in range(3):
        assert torch.equal(impl.forward(case.query, case.key, case.value, cache, plan), expected)


def test_many_requests_of_unequal_lengths():
    generator = torch.Generator().manual_seed(0)
    lengths = [(1, int(n)) for n in torch.randint(1, 300, (700,), generator=generator)] + [(1, 20000)]
    case = PagedCase(AttentionLayerSpec(8, 2, 64, 0.125), lengths, dtype=torch.bfloat16, device="cuda")
    assert relative_error(case.run(TritonBackend), case.expected()) < 1e-2


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("lengths", ["even", "uneven"])
@pytest.mark.parametrize("num_requests", [1, 16, 32, 64, 100])
@pytest.mark.parametrize("dependent", [False, True])
def test_parts_merged_by_the_last_of_them(size, lengths, num_requests, dependent):
    """Layer after layer with the same counters and buffers: each gives the same bits, in every replay."""
    if dependent and (COMPUTE is None or COMPUTE < (9, 0)):
        pytest.skip("dependent launch needs compute capability 9.0")
    spec = AttentionLayerSpec(32, 8, size, size**-0.5)
    lens = (
        [640] * num_requests if lengths == "even" else [300 + 37 * (n % 13) for n in range(num_requests - 1)] + [9000]
    )
    case = PagedCase(spec, [(1, n) for n in lens], dtype=torch.bfloat16, device="cuda")
    cache, impl = case.cache(TritonBackend), TritonBackend.impl(spec)
    builder = TritonBackend.metadata_builder(spec, torch.device("cuda"))
    common, expected = case.common(), case.expected()

    def step() -> list[torch.Tensor]:
        plan = builder.build(common)
        return [impl.forward(case.query, case.key, case.value, cache, plan) for _ in range(6)]

    launch.set_dependent(dependent)
    try:
        first = step()[0]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
    finally:
        launch.set_dependent(False)
    assert relative_error(first, expected) < 1e-2
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(result, first) for result in results)
