"""Products with weights of 8 bits in blocks of floats, or of integers, in Triton against plain torch."""

import pytest
import torch

from pagemill.model.kernels.eight_bits import EightBits, floats, integers, reference_quantize
from pagemill.model.kernels.fp8 import FP8
from tests.fakes.triton_interpreter import DEVICE
from tests.marks import slow
from tests.unit.model.kernels.eight_bits_cases import blocks

from pagemill.model.kernels.triton import eight_bits, parts  # isort: skip
from pagemill.model.kernels.triton.choices import GemvChoice, Shape
from pagemill.model.kernels.triton.eight_bits_choices import (
    MANY_CANDIDATES,
    ROW_CLASSES,
    FewChoice,
    ManyChoice,
    few_candidates,
    few_choice,
    many_choice,
)
from pagemill.model.kernels.triton.eight_bits_gemv import blocks_gemv
from pagemill.model.kernels.triton.eight_bits_many import product
from pagemill.model.kernels.triton.eight_bits_quantize import quantize
from pagemill.model.kernels.triton.eight_bits_rows import few_rows
from pagemill.model.kernels.triton.gated import gated
from pagemill.model.kernels.triton.norm import rms_norm, rms_norm_groups

STEP = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
KINDS = ("blocks", "rows", "integers")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def weight_of(kind: str, outputs: int, inputs: int) -> EightBits:
    """Of floats in blocks of 128 x 128, or of 1 x 128, or of integers with a scale per output."""
    if kind == "integers":
        values = torch.randint(-128, 128, (outputs, inputs), generator=torch.Generator().manual_seed(0))
        return integers(values.to(torch.int8).to(DEVICE), (random(outputs).abs() + 0.5) / 128 / inputs**0.5)
    return blocks(outputs, inputs, shared=kind == "blocks", device=DEVICE)


def wanted(x: torch.Tensor, weight: EightBits, bias: torch.Tensor | None, gate: str | None) -> torch.Tensor:
    result = x.double() @ floats(weight, torch.float32).double().T
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


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32), slow(torch.float16)])
@pytest.mark.parametrize(
    ("choice", "gate", "with_bias", "outputs", "inputs"),
    [
        (FewChoice(8, 64, 4, 2, 2), "silu", False, 256, 384),
        slow(FewChoice(16, 128, 4, 2, 3), None, True, 200, 400),
        slow(FewChoice(16, 32, 4, 2), "gelu_tanh", True, 256, 128),
    ],
)
def test_a_few_rows(kind, dtype, choice: FewChoice, gate: str | None, with_bias: bool, outputs: int, inputs: int):
    weight = weight_of(kind, outputs, inputs)
    bias = random(outputs, seed=4) if with_bias else None
    for num_rows in (1, 19):
        x = random(num_rows, inputs + 8, dtype=dtype)[:, 8:]
        check(few_rows(x, weight, choice, bias=bias, gate=gate), wanted(x, weight, bias, gate))
    counters = parts.counters_of(x.device)
    assert counters is not None
    assert not counters.any()


@pytest.mark.cases(one_in=6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("gate", "with_bias", "outputs", "inputs"),
    [(None, True, 200, 400), ("silu", False, 256, 512), slow("gelu_tanh", True, 512, 100)],
)
def test_one_row_of_blocks(dtype, gate: str | None, with_bias: bool, outputs: int, inputs: int):
    weight = weight_of("blocks", outputs, inputs)
    bias = random(outputs, seed=4) if with_bias else None
    x = random(1, inputs, dtype=dtype)
    for choice in (GemvChoice(4, 256, 4, 1), GemvChoice(16, 1024, 4, 1)):
        check(blocks_gemv(x, weight, choice, bias=bias, gate=gate), wanted(x, weight, bias, gate))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("with_bias", "outputs", "inputs"), [(False, 256, 256), slow(True, 200, 400)])
def test_many_rows(kind: str, with_bias: bool, outputs: int, inputs: int):
    weight = weight_of(kind, outputs, inputs)
    bias = random(outputs, seed=4) if with_bias else None
    x = random(70, inputs)
    numbers, factors = reference_quantize(x, weight.group, weight.values.dtype)
    quantized = floats(EightBits(numbers, factors.contiguous(), weight.group, 1), torch.float32)
    expected = wanted(quantized, weight, bias, None)
    for choice in (ManyChoice(32, 64, 4, 2), ManyChoice(64, 128, 4, 2)):
        result = product(numbers.contiguous(), factors.contiguous(), weight, choice, x.dtype, bias)
        # Tensor cores keep fewer places of sums of 8-bit floats.
        torch.testing.assert_close(result.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("group", [128, 400])
@pytest.mark.parametrize("gate", [None, slow("silu"), slow("gelu_tanh")])
def test_rows_are_quantized_by_groups(dtype: torch.dtype, group: int, gate: str | None):
    x = random(5, 400 if gate is None else 800, dtype=torch.bfloat16)
    x[3] = 0
    numbers, factors = quantize(x, group, dtype, gate)
    plain = x if gate is None else gated(x, gate == "gelu_tanh")
    expected, expected_factors = reference_quantize(plain, group, dtype)
    torch.testing.assert_close(factors, expected_factors)
    # The interpreter halves what it should round up to a power of two of 8-bit floats.
    same = (numbers.float() == expected.float()).float().mean()
    assert same > (0.9 if DEVICE == "cpu" and dtype == FP8 else 0.999)


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter: as a product, and as an integer
def test_a_group_with_no_number_stays_one(dtype: torch.dtype, poison: float):
    x = random(3, 400, dtype=torch.bfloat16)
    x[1, 130] = poison
    _, factors = quantize(x, 128, dtype)
    assert not factors[1, 1].isfinite()
    assert factors.isfinite().sum() == factors.numel() - 1
    _, whole = quantize(x, 400, dtype)
    assert whole.isfinite().flatten().tolist() == [True, False, True]


@pytest.mark.cases(one_in=8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", [None, "silu"])
def test_the_number_of_rows_decides_how(monkeypatch, kind: str, gate: str | None):
    weight = weight_of(kind, 256, 128)
    monkeypatch.setattr(eight_bits, "MAX_FEW_ROWS", 3)
    assert eight_bits.linear(random(0, 128), weight, None, gate).shape == (0, 256 if gate is None else 128)
    for num_rows in (1, 3, 5):
        x = random(num_rows, 128, dtype=torch.bfloat16)
        expected = wanted(x, weight, None, gate)
        result = eight_bits.linear(x, weight, None, gate)
        assert result.shape == expected.shape
        off = (result.double() - expected).norm() / expected.norm()
        assert off < (0.15 if num_rows == 5 else 0.01)  # the interpreter rounds to 8-bit floats as it should not
    both = random(5, 256, dtype=torch.bfloat16)
    before = eight_bits.gated_linear(both, "silu", weight)
    assert torch.equal(before, eight_bits.linear(gated(both, False), weight))
    assert eight_bits.gated_linear(both[:2], "silu", weight).shape == (2, 256)
    assert not eight_bits.quantizes(random(5, 128), weight)


@pytest.mark.parametrize("shape", [(4096, 4096, False), (12288, 4096, True), (4096, 12288, False), (64, 64, False)])
def test_choices_fit_every_shape(shape: Shape):
    for rows in ROW_CLASSES:
        choice = few_choice(rows, shape)
        assert choice.block_m == rows
        assert choice.split_k == 1 or shape[1] // choice.split_k >= 512
        assert choice.split_k > 1 or shape != (4096, 4096, False)
        if shape != (64, 64, False):
            assert few_candidates(rows, shape)
    assert many_choice(4096, shape[0]).block_m >= many_choice(65, shape[0]).block_m
    assert len(set(MANY_CANDIDATES)) == len(MANY_CANDIDATES)


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(("group", "dtype"), [(128, FP8), (128, torch.int8), (4096, torch.int8)])
@pytest.mark.parametrize("size", [64, 200, 1024])
@pytest.mark.parametrize("kind", ["plain", "residual", "float32 weight"])
@pytest.mark.parametrize("num_rows", [0, 1, 11])
def test_a_norm_writes_what_quantizing_its_result_would(group: int, dtype: torch.dtype, size: int, kind: str, num_rows):
    x = random(num_rows, size + 8, dtype=torch.bfloat16)[:, 8:]
    x[3:4] = 0
    norm = random(size, dtype=torch.float32 if kind == "float32 weight" else torch.bfloat16, seed=1), 1e-6
    sums = (
        [random(num_rows, size, dtype=torch.bfloat16, seed=2) for _ in range(2)] if kind == "residual" else [None] * 2
    )
    numbers, factors = rms_norm_groups(x, norm, sums[0], group, dtype, 8)
    expected = quantize(rms_norm(x, *norm, sums[1]), group, dtype, None, 8)
    assert numbers.shape == expected[0].shape
    assert torch.equal(factors[:, :num_rows], expected[1][:, :num_rows])
    assert torch.equal(numbers[:num_rows].view(torch.uint8), expected[0][:num_rows].view(torch.uint8))
    if sums[0] is not None:
        assert torch.equal(sums[0], sums[1])


@pytest.mark.parametrize("kind", ["blocks", "integers"])
def test_a_norm_and_its_product_as_one_after_the_other(kind: str):
    weight = weight_of(kind, 130, 200)
    x, residual = random(37, 200, dtype=torch.bfloat16), random(37, 200, dtype=torch.bfloat16, seed=5)
    norm = random(200, dtype=torch.bfloat16, seed=6), 1e-6
    bias = random(130, dtype=torch.bfloat16, seed=7)
    expected = eight_bits.linear(rms_norm(x, *norm, residual.clone()), weight, bias)
    assert torch.equal(eight_bits.norm_linear(x, residual, norm, weight, bias), expected)
