"""The native kernels against their torch references, over sizes that are and are not multiples of a vector."""

import pytest
import torch

from pagemill.model.kernels import native, ops, reference

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def needs_the_library():
    if native.library() is None:
        pytest.skip("the native kernels are not available")


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_rms_norm(dtype, size, rows, wide_weight):
    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=torch.float32 if wide_weight else dtype, seed=2)
    torch.testing.assert_close(
        native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **TOLERANCE[dtype]
    )
    ours, theirs = residual.clone(), residual.clone()
    result = native.rms_norm(x, weight, 1e-5, ours)
    torch.testing.assert_close(result, reference.rms_norm(x, weight, 1e-5, theirs), **TOLERANCE[dtype])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_within_a_wider_tensor(dtype):
    wide = random(5, 400, dtype=dtype)
    heads = wide[:, 40:232].view(5, 3, 64)
    weight = random(64, dtype=dtype)
    torch.testing.assert_close(
        native.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6), **TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [8, 24, 64, 80, 256])
def test_rotate(dtype, head_size):
    wide = random(6, 5 * head_size + 8, dtype=dtype)
    cos, sin = random(6, head_size // 2, dtype=dtype, seed=1), random(6, head_size // 2, dtype=dtype, seed=2)
    cos, sin = torch.cat([cos, cos], 1), torch.cat([sin, sin], 1)
    ours, theirs = wide.clone(), wide.clone()
    native.rotate_(ours[:, head_size : 4 * head_size].view(6, 3, head_size), cos, sin)
    reference.rotate_(theirs[:, head_size : 4 * head_size].view(6, 3, head_size), cos, sin)
    torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])
    assert torch.equal(ours[:, :head_size], wide[:, :head_size])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 100, 1536])
@pytest.mark.parametrize("gelu", [False, True])
def test_gated(dtype, size, gelu):
    x = random(9, 2 * size, dtype=dtype) * 4
    torch.testing.assert_close(native.gated(x, gelu), reference.gated(x, gelu), **TOLERANCE[dtype])


def test_extreme_gates_stay_finite():
    x = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    for gelu in (False, True):
        torch.testing.assert_close(native.gated(x, gelu), reference.gated(x, gelu), rtol=1e-5, atol=1e-5)


def test_types_that_the_kernels_do_not_know_run_in_torch():
    x = random(3, 64, dtype=torch.float16)
    assert ops.silu_mul(x).dtype == torch.float16
