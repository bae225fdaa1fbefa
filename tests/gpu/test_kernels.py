"""The Triton kernels compiled, on the shapes of real models: against torch, run to run, and in captured graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from pagemill.model.kernels import ops, reference
from pagemill.model.kernels.kv_target import KVTarget
from pagemill.worker.sampling.filters import min_p_, top_k_top_p_
from pagemill.worker.sampling.philox import uniform
from tests.fakes.triton_interpreter import DEVICE

from pagemill.model.kernels.triton import choices, device, launch  # isort: skip
from pagemill.model.kernels.triton.gated_prompts import gated_many  # isort: skip
from pagemill.model.kernels.triton.gemv import gemv  # isort: skip
from pagemill.model.kernels.triton.norm_before import NormBefore  # isort: skip
from pagemill.model.kernels.triton.skinny import skinny  # isort: skip

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")]
LINEARS = [
    (6144, 4096, None), (4096, 4096, None), (12288, 4096, "silu"), (4096, 12288, None), (3072, 2048, None),
    (8192, 2048, "silu"), (2048, 8192, None), (1024, 1500, "gelu_tanh"),
]  # fmt: skip
"""Outputs (of one half), inputs, gate."""


@pytest.fixture(autouse=True)
def plain_launches() -> Iterator[None]:
    yield
    launch.set_dependent(False)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def weight_of(outputs: int, inputs: int, gate: str | None) -> torch.Tensor:
    return random(outputs * (2 if gate else 1), inputs, seed=1) / inputs**0.5


def exact(x: torch.Tensor, weight: torch.Tensor, gate: str | None) -> torch.Tensor:
    result = functional.linear(x.float(), weight.float())
    if gate is None:
        return result
    first, second = result.chunk(2, -1)
    act = functional.silu(first) if gate == "silu" else functional.gelu(first, approximate="tanh")
    return act * second


def close(actual: torch.Tensor, expected: torch.Tensor, step: float = 1e-2) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=step, atol=step)


@pytest.mark.parametrize("linear", LINEARS, ids=str)
def test_one_row(linear):
    weight, gate = weight_of(*linear), linear[2]
    x = random(1, linear[1])
    result = ops.linear(x, weight, None, gate)
    close(result, exact(x, weight, gate))
    assert torch.equal(result, ops.linear(x, weight, None, gate))


@pytest.mark.parametrize("stages", [1, 3])
def test_one_row_with_its_norm(stages: int):
    x, residual, norm = random(1, 4096), random(1, 4096, seed=2), random(4096, seed=3)
    weight = weight_of(6144, 4096, None)
    before = NormBefore(norm, 1e-6, residual, torch.empty_like(x))
    result = gemv(x, weight, choices.GemvChoice(8, 512, 4, stages), norm=before)
    copy = residual.clone()
    normed = reference.rms_norm(x, norm, 1e-6, copy)
    assert torch.equal(before.summed, copy)
    close(result, exact(normed, weight, None), 3e-2)


def test_the_head_gives_float32():
    x, weight = random(1, 2048), weight_of(128256, 2048, None)
    result = ops.linear(x, weight, out_dtype=torch.float32)
    assert result.dtype == torch.float32
    close(result, exact(x, weight, None), 1e-3)
    many = random(9, 2048)
    close(ops.linear(many, weight, out_dtype=torch.float32), exact(many, weight, None), 1e-3)


@pytest.mark.parametrize("num_rows", [2, 8, 32, 61])
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("linear", LINEARS[:-1], ids=str)
def test_a_few_rows(num_rows: int, dependent: bool, linear):
    launch.set_dependent(dependent)
    weight, gate, x = weight_of(*linear), linear[2], random(num_rows, linear[1])
    shape = (linear[0], linear[1], gate is not None)
    rows = choices.rows_class(num_rows)
    late = [choice for choice in choices.skinny_candidates(shape, rows) if not choice.early]
    for choice in dict.fromkeys([*late, choices.SKINNY_MEASURED.get((rows, shape), late[0])]):
        results = [skinny(x, weight, choice, gate=gate) for _ in range(3)]
        close(results[0], exact(x, weight, gate))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("num_rows", [8, 32, 61])
@pytest.mark.parametrize(("hidden", "inner", "qkv"), [(4096, 12288, 6144), (2048, 8192, 3072)])
def test_layers_of_a_few_rows(num_rows: int, hidden: int, inner: int, qkv: int):
    """Kernels that start before the last one has ended share counters and scratch: as when they run one by one. Those
    that do part of a norm give what norms apart give, but for the rounding."""
    shapes = (qkv, hidden, None), (hidden, hidden, None), (inner, hidden, "silu"), (hidden, inner, None)
    layers = [[weight_of(*shape) for shape in shapes] for _ in range(4)]
    norm, start = random(hidden, seed=3), random(num_rows, hidden)

    def apart(x: torch.Tensor, before: torch.Tensor, residual: torch.Tensor, *rest: Any) -> tuple:
        return ops.norm_linear(ops.linear(x, before), residual, *rest)

    def step(join: Callable = ops.linear_norm_linear) -> torch.Tensor:
        scale = norm, 1e-6
        mixed, residual = ops.norm_linear(start, start * 0.5, scale, layers[0][0])
        for index, (_, out, gate_up, down) in enumerate(layers):
            inner, residual = join(mixed[:, :hidden], out, residual, scale, gate_up, None, "silu")
            if index + 1 < len(layers):
                mixed, residual = join(inner, down, residual, scale, layers[index + 1][0])
        return ops.linear_norm(inner, down, scale, residual)

    launch.set_dependent(False)
    expected, plain, results = step(), step(apart), []
    assert float((expected.float() - plain.float()).norm()) < 1e-2 * float(plain.float().norm())
    for dependent in (False, True):
        launch.set_dependent(dependent)
        assert torch.equal(step(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(step())
        for _ in range(20):
            graph.replay()
        assert torch.equal(results[-1], expected)


@pytest.mark.parametrize("num_tokens", [1, 257])
def test_norms_and_activations(num_tokens: int):
    x, residual, weight = random(num_tokens, 4096), random(num_tokens, 4096, seed=1), random(4096, seed=2)
    copy = residual.clone()
    close(ops.rms_norm(x, weight, 1e-6, residual), reference.rms_norm(x, weight, 1e-6, copy), 2e-2)
    assert torch.equal(residual, copy)
    close(ops.gated(x, "silu"), reference.gated(x, False))
    close(ops.gated(x, "gelu_tanh"), reference.gated(x, True))


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(512, 12288, 4096), (777, 256, 1496), (2048, 8192, 2048)])
def test_gates_of_many_rows_in_one_kernel(rows: int, outputs: int, inputs: int, dependent: bool, gate: str):
    """Also where rows and inputs end within a tile; in a graph, and called for rows that it leaves to cuBLAS."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper GPUs")
    launch.set_dependent(dependent)
    x, weight = random(rows, inputs) / 8, random(2 * outputs, inputs, seed=1) / 8
    expected = reference.linear(x.float(), weight.float(), None, gate)
    for _ in range(3):
        close(gated_many(x, weight, gate == "gelu_tanh"), expected, 2e-2)
    close(ops.linear(x, weight, None, gate), expected, 2e-2)
    # The bits are those of a few rows, where each output is one sum too.
    few = ops.invariant_linear(x[:100], weight, None, gate)
    assert torch.equal(gated_many(x, weight, gate == "gelu_tanh")[:100], few)


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize(("size", "normed"), [(128, True), (64, False)])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_from_the_projection_to_the_cache(num_tokens: int, size: int, normed: bool, cache_dtype: torch.dtype):
    heads, kv_heads = 32, 8
    qkv = random(num_tokens, (heads + 2 * kv_heads) * size)
    angles = random(num_tokens, size // 2, dtype=torch.float32).repeat(1, 2)
    rope = angles.cos().bfloat16(), angles.sin().bfloat16()
    norms = ((random(size, seed=3), 1e-6), (random(size, seed=4), 1e-6)) if normed else None
    slots = torch.randperm(16 * 32, device="cuda")[:num_tokens]
    slots[0] = 5 if num_tokens == 1 else -1
    scale = torch.tensor([0.05], device="cuda") if cache_dtype.itemsize == 1 else None
    caches = [torch.zeros(32, 2, 16, kv_heads, size, device="cuda").to(cache_dtype) for _ in range(2)]
    ours, wanted = (KVTarget(cache[:, 0], cache[:, 1], slots, scale, scale) for cache in caches)
    query, _, _ = ops.attention_inputs(qkv, heads, size, rope, norms, ours)
    expected = qkv.view(num_tokens, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    q, k, v = (part.clone() for part in expected)
    if norms is not None:
        q, k = reference.rms_norm(q, *norms[0]), reference.rms_norm(k, *norms[1])
    reference.rotate_(q, *rope)
    reference.rotate_(k, *rope)
    reference.write_kv(k, v, wanted)
    close(query, q, 3e-2)
    step = 0.13 if scale is not None else 3e-2
    close(caches[0].float(), caches[1].float(), step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_argmax(dtype: torch.dtype, num_rows: int):
    logits = random(num_rows, 151936, dtype=dtype)
    assert torch.equal(ops.argmax(logits).cpu(), logits.float().cpu().argmax(-1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_no_distribution_have_no_token(bad: float):
    logits = random(len(ASKED), 151936, dtype=torch.float32)
    settings = torch.from_numpy(settings_of(ASKED, np.arange(len(ASKED), dtype=np.uint64))).cuda()
    positions = torch.arange(len(ASKED), device="cuda")
    sound, likeliest = ops.sample_rows(logits, settings, positions), ops.argmax(logits)
    logits[::2, slice(None) if bad == -torch.inf else 77_777] = bad
    for before, after in ((sound, ops.sample_rows(logits, settings, positions)), (likeliest, ops.argmax(logits))):
        assert after[::2].tolist() == [-1] * len(after[::2])
        assert after[1::2].tolist() == before[1::2].tolist()


ASKED = [(1.0, 1.0, 0.0, 0), (1.0, 0.95, 0.0, 50), (0.7, 0.9, 0.0, 0), (5.0, 0.95, 0.0, 0), (1.0, 1.0, 0.05, 0),
         (1.0, 0.9, 0.01, 2000), (1.0, 1.0, 0.0, 1), (1.0, 1.0, 0.0, 20)]  # fmt: skip
"""temperature, top_p, min_p, top_k."""


def settings_of(asked: list[tuple[float, float, float, int]], seeds: np.ndarray) -> np.ndarray:
    """Rows of sampling settings."""
    settings = np.zeros((len(asked), 7), np.int32)
    settings[:, :3] = np.array([row[:3] for row in asked], np.float32).view(np.int32)
    settings[:, 3] = [row[3] for row in asked]
    settings[:, 5:] = seeds.view(np.int32).reshape(-1, 2)
    return settings


@pytest.mark.parametrize("vocab_size", [128256, 151936])
@pytest.mark.parametrize("scale", [0.05, 0.5, 1.5, 4.0])
def test_sampled_tokens_are_the_hosts(vocab_size: int, scale: float):
    asked = ASKED * 6
    logits = random(len(asked), vocab_size, dtype=torch.float32) * scale
    generator = np.random.default_rng(0)
    seeds, positions = generator.integers(0, 2**64, len(asked), np.uint64), np.arange(len(asked), dtype=np.int64)
    settings = settings_of(asked, seeds)
    tokens = ops.sample_rows(logits, torch.from_numpy(settings).cuda(), torch.from_numpy(positions).cuda())
    temperature, top_p, min_p, top_k = (torch.tensor(column) for column in zip(*asked, strict=True))
    wide = logits.cpu() / temperature.unsqueeze(1)
    min_p_(wide, min_p)
    top_k_top_p_(wide, top_k.long(), top_p)
    cumulative = wide.double().softmax(-1).cumsum(-1)
    targets = torch.from_numpy(uniform(seeds, positions)).unsqueeze(1) * cumulative[:, -1:]
    # Sums of 150,000 terms in float32 are off by some 1e-5, so a token's edge may lie on either side of the number.
    chosen = tokens.cpu().unsqueeze(1)
    above = cumulative.gather(1, chosen)
    below = above - wide.double().softmax(-1).gather(1, chosen)
    assert bool(((targets >= below - 1e-4) & (targets <= above + 1e-4)).all())
    assert bool(wide.gather(1, chosen).isfinite().all()), "kept by the filters"


def chain(x: torch.Tensor, weights: list[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
    """Two layers without attention."""
    residual = None
    for _ in range(2):
        inner, residual = device.norm_linear(x, residual, (norm, 1e-6), weights[0], None, "silu")
        x = device.linear(inner, weights[1])
    return device.rms_norm(x, norm, 1e-6, residual)


@pytest.mark.parametrize("fused", [False, True])
def test_dependent_launches_in_a_graph_change_nothing(fused: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choices, "FUSED_NORM_MEASURED", frozenset({(8192, 2048, True)} if fused else ()))
    weights = [weight_of(8192, 2048, "silu"), weight_of(2048, 8192, None)]
    x, norm = random(1, 2048), random(2048, seed=5)
    expected = chain(x, weights, norm)
    launch.set_dependent(torch.cuda.get_device_capability() >= (9, 0))
    chain(x, weights, norm)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = chain(x, weights, norm)
    for seed in range(20):
        replays = []
        for _ in range(2):
            x.copy_(random(1, 2048, seed=seed))  # each time: the residual sum takes its place
            graph.replay()
            torch.cuda.synchronize()
            replays.append(result.clone())
        assert torch.equal(*replays)
    x.copy_(random(1, 2048))
    graph.replay()
    close(result, expected, 2e-2)
