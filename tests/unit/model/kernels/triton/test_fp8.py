"""Quantizing and multiplying 8-bit floats in Triton against plain torch."""

import pytest
import torch

from pagemill.model.kernels.fp8 import reference_quantize
from tests.fakes.triton_interpreter import DEVICE

from pagemill.model.kernels.triton import fp8  # isort: skip
from pagemill.model.kernels.triton.choices import GemvChoice
from pagemill.model.kernels.triton.fp8_choices import FewRowsChoice, few_rows_choice, one_row_choice
from pagemill.model.kernels.triton.fp8_rows import few_rows
from pagemill.model.kernels.triton.gemv import gemv

STEP = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GATES = [None, "silu", "gelu_tanh"]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("size", [16, 100, 576])
def test_quantize(size: int):
    rows = random(5, size + 4)[:, 4:]
    rows[3] = 0
    floats, factors = fp8.quantize(rows)
    expected, expected_factors = reference_quantize(rows)
    torch.testing.assert_close(factors, expected_factors)
    # The interpreter halves what it should round up to a power of two.
    powers = expected.float().abs().log2().frac() == 0
    same = floats.float() == expected.float()
    assert (same | (powers if DEVICE == "cpu" else same)).all()


def exact(x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, bias, gate) -> torch.Tensor:
    result = x.double() @ (weight.double() * factors.double().unsqueeze(1)).T
    if bias is not None:
        result += bias.double()
    if gate is None:
        return result
    first, second = result.chunk(2, -1)
    act = torch.nn.functional.silu(first) if gate == "silu" else torch.nn.functional.gelu(first, approximate="tanh")
    return act * second


def check(result: torch.Tensor, expected: torch.Tensor) -> None:
    step = STEP[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=step, atol=step * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("outputs", "size"), [(32, 64), (40, 100)])
def test_one_row_and_a_few(dtype: torch.dtype, gate, with_bias: bool, outputs: int, size: int):
    weight, factors = reference_quantize(random(outputs, size, seed=1) / 8)
    bias = random(outputs, dtype=dtype, seed=2) if with_bias else None
    x = random(1, size, dtype=dtype)
    one = gemv(x, weight, GemvChoice(4, 64, 4, 1), bias=bias, gate=gate, factors=factors)
    check(one, exact(x, weight, factors, bias, gate))
    x = random(5, size + 8, dtype=dtype)[:, 8:]
    for split_k in (1, 2):
        choice = FewRowsChoice(16, 32, 4, 2, split_k)
        check(few_rows(x, weight, factors, bias, gate, choice), exact(x, weight, factors, bias, gate))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 33])
@pytest.mark.parametrize("gate", GATES)
def test_the_number_of_rows_decides_how(num_rows: int, gate):
    weight, factors = reference_quantize(random(24, 40, seed=1) / 8)
    x = random(num_rows, 40)
    result = fp8.linear(x, weight, factors, None, gate)
    assert result.shape == (num_rows, 24 if gate is None else 12)
    if num_rows:
        check(result, exact(x, weight, factors, None, gate))


def test_choices_fit_every_shape():
    assert few_rows_choice(4096, 4096).split_k > 1
    assert few_rows_choice(151_936, 4096).split_k == 1
    assert few_rows_choice(64, 64).split_k == 1
    assert one_row_choice(24_576, False).block_n > one_row_choice(4096, False).block_n
