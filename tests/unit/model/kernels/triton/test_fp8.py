"""Quantizing and multiplying 8-bit floats in Triton against plain torch."""

import pytest
import torch

from pagemill.model.kernels.fp8 import reference_quantize
from tests.fakes.triton_interpreter import DEVICE
from tests.marks import slow

from pagemill.model.kernels.triton import fp8  # isort: skip
from pagemill.model.kernels.triton.choices import GemvChoice
from pagemill.model.kernels.triton.fp8_choices import FewRowsChoice, few_rows_choice, one_row_choice
from pagemill.model.kernels.triton.fp8_quantize import pieces
from pagemill.model.kernels.triton.fp8_rows import few_rows
from pagemill.model.kernels.triton.gated import gated
from pagemill.model.kernels.triton.gemv import gemv
from pagemill.model.kernels.triton.norm import rms_norm, rms_norm_floats

pytestmark = pytest.mark.cases(one_in=6)

STEP = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GATES = [None, "silu", slow("gelu_tanh")]


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


# The interpreter warns of what NumPy multiplies.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [100, 3000])
def test_a_row_with_no_number_stays_one(size: int, poison: float):
    rows = random(3, size)
    rows[1, size // 2 :: 7] = poison
    floats, factors = fp8.quantize(rows)
    made = floats.float() * factors[:, None]
    assert made[1].isnan().all() if poison != poison else made[1].isnan().any()
    assert made[[0, 2]].isfinite().all()
    assert torch.equal(factors[[0, 2]], fp8.quantize(rows[[0, 2]])[1])


def same_bits(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (1, (1, 0)), (4096, (4096, 0)), (100, (128, 0)), (3000, (2048, 1024)), (12288, (8192, 4096)),
        (14336, (16384, 0)), (18944, (16384, 4096)), (28672, (32768, 0)),
    ],
)  # fmt: skip
def test_a_row_is_one_power_of_two_or_two_where_they_are_less(size: int, found: tuple[int, int]):
    assert pieces(size) == found


@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("size", [64, 100, 4096])
@pytest.mark.parametrize("kind", ["plain", "residual", "float32 weight"])
def test_a_norm_writes_what_quantizing_its_result_would(dtype: torch.dtype, num_rows: int, size: int, kind: str):
    x = random(num_rows, size + 8, dtype=dtype)[:, 8:]
    x[3:4] = 0
    weight = random(size, dtype=torch.float32 if kind == "float32 weight" else dtype, seed=1)
    sums = [random(num_rows, size, dtype=dtype, seed=2) for _ in range(2)] if kind == "residual" else [None, None]
    same_bits(rms_norm_floats(x, weight, 1e-6, sums[0]), fp8.quantize(rms_norm(x, weight, 1e-6, sums[1])))
    if sums[0] is not None:
        assert torch.equal(sums[0], sums[1])
        assert not torch.equal(sums[0], random(num_rows, size, dtype=dtype, seed=2)) or not num_rows


@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("num_rows", "size"), [(0, 16), (1, 24), (5, 1500)])
def test_a_gated_activation_writes_what_quantizing_its_result_would(dtype, gate: str, num_rows: int, size: int):
    x = random(num_rows, 2 * size + 8, dtype=dtype)[:, : 2 * size]
    x[3:4] = 0
    same_bits(fp8.quantize(x, gate), fp8.quantize(gated(x, gate == "gelu_tanh")))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("with_bias", [False, slow(True)])
def test_many_rows_are_quantized_by_what_comes_before(monkeypatch, gate, with_bias: bool):
    def multiply(rows, weight, scale_a, scale_b, out_dtype, use_fast_accum):
        return ((rows.float() @ weight.float()) * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    weight, factors = reference_quantize(random(32, 48, seed=1) / 8)
    bias = random(32, dtype=torch.bfloat16, seed=2) if with_bias else None
    x = random(40, 96, dtype=torch.bfloat16)
    if gate is not None:
        expected = fp8.linear(gated(x, gate == "gelu_tanh"), weight, factors, bias)
        assert torch.equal(fp8.gated_linear(x, gate, weight, factors, bias), expected)
        return
    x, norm = x[:, :48], (random(48, dtype=torch.bfloat16, seed=3), 1e-6)
    residual = random(40, 48, dtype=torch.bfloat16, seed=4)
    expected = fp8.linear(rms_norm(x, *norm, residual.clone()), weight, factors, bias)
    assert torch.equal(fp8.norm_linear(x, residual, norm, weight, factors, bias), expected)


def test_which_rows_are_quantized():
    weight = torch.empty(32, 48)
    assert fp8.quantizes(33, torch.bfloat16, weight)
    assert not fp8.quantizes(32, torch.bfloat16, weight)
    assert not fp8.quantizes(33, torch.float32, weight)
    assert not fp8.quantizes(33, torch.bfloat16, torch.empty(32, 40))
    assert not fp8.quantizes(33, torch.bfloat16, torch.empty(40, 48))


def test_few_rows_are_quantized_where_there_are_tiles_for_them(monkeypatch):
    monkeypatch.setattr(fp8, "available", lambda device: True)
    weight = torch.empty(32, 48)
    assert fp8.quantizes(2, torch.bfloat16, weight)
    assert not fp8.quantizes(1, torch.bfloat16, weight)
    assert not fp8.quantizes(2, torch.float32, weight)
    assert not fp8.quantizes(2, torch.bfloat16, torch.empty(32, 40))


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
@pytest.mark.parametrize("with_bias", [slow(False), True])
@pytest.mark.parametrize(("outputs", "size"), [slow(32, 64), (40, 100)])
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
    assert one_row_choice(24_576, 64, False).block_n > one_row_choice(4096, 64, False).block_n
