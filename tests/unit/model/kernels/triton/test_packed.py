"""Products with packed integers in Triton against plain torch."""

from dataclasses import replace

import pytest
import torch

from pagemill.model.kernels.packed import HALVES, floats, pack
from tests.fakes.triton_interpreter import DEVICE
from tests.marks import slow
from tests.unit.model.kernels.packed_cases import exact, made

from pagemill.model.kernels.triton import packed, parts  # isort: skip
from pagemill.model.kernels.triton.choices import Shape
from pagemill.model.kernels.triton.packed_choices import MAX_ROWS, ROW_CLASSES, PackedChoice, candidates, packed_choice
from pagemill.model.kernels.triton.packed_gemv import packed_gemv
from pagemill.model.kernels.triton.packed_rows import packed_rows

STEP = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
PLAIN = PackedChoice(16, 64, 4, 2)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def wanted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gate: str | None) -> torch.Tensor:
    result = x.double() @ weight.double().T
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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "late"),
    [
        (torch.bfloat16, 128, True),
        slow(torch.bfloat16, 256, False),
        slow(torch.float16, 32, True),
        slow(torch.float32, 64, True),
    ],
)
def test_groups_of_every_size(bits: int, with_zeros: bool, dtype: torch.dtype, size: int, late: bool):
    values, scales, zeros = made(72, 256, size, bits, with_zeros, DEVICE)
    weight = pack(values, scales, zeros, size, bits)
    x = random(3, 264, dtype=dtype)[:, 8:]
    expected = wanted(x, exact(values, scales, zeros, size), None, None)
    check(packed_rows(x, weight, replace(PLAIN, late=late)), expected)
    check(packed_gemv(x[:1], weight, PackedChoice(1, 8, 4, 1, slices=2)), expected[:1])


@pytest.mark.parametrize(
    ("choice", "gate", "with_bias", "outputs", "inputs"),
    [
        (PackedChoice(8, 32, 2, 2), "silu", False, 128, 200),
        slow(PackedChoice(16, 128, 4, 2, 2), None, True, 200, 384),
        slow(PackedChoice(16, 128, 4, 2, 2), "gelu_tanh", False, 384, 200),
        slow(PackedChoice(8, 64, 4, 2, 3), "silu", True, 128, 576),
    ],
)
def test_tiles_parts_and_gates(choice: PackedChoice, gate: str | None, with_bias: bool, outputs: int, inputs: int):
    values, scales, zeros = made(outputs, inputs, 64, 4, True, DEVICE)
    weight = pack(values, scales, zeros, 64, 4)
    bias = random(outputs, seed=4) if with_bias else None
    for num_rows in (1, 19):
        x = random(num_rows, inputs)
        expected = wanted(x, exact(values, scales, zeros, 64), bias, gate)
        check(packed_rows(x, weight, choice, bias=bias, gate=gate), expected)
        if num_rows == 1:
            one = PackedChoice(1, 8, 4, 1, slices=4)
            check(packed_gemv(x, weight, one, bias=bias, gate=gate), expected)
    counters = parts.counters_of(x.device)
    assert counters is not None
    assert not counters.any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_the_weight_as_floats(bits: int, with_zeros: bool):
    values, scales, zeros = made(100, 200, 32, bits, with_zeros, DEVICE)
    weight = pack(values, scales, zeros, 32, bits)
    expected = exact(values, scales, zeros, 32)
    torch.testing.assert_close(packed.floats(weight, torch.float32), expected)


@pytest.mark.parametrize("num_rows", [0, 1, slow(65)])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("outputs", [80, slow(128)])
def test_the_number_of_rows_decides_how(monkeypatch, num_rows: int, gate: str | None, outputs: int):
    values, scales, _ = made(outputs, 128, 128, 4, False, DEVICE)
    weight = pack(values, scales, None, 128, 4)
    x = random(num_rows, 128)
    for most in (MAX_ROWS, 0):
        monkeypatch.setattr(packed, "MAX_ROWS", most)
        result = packed.linear(x, weight, None, gate)
        assert result.shape == (num_rows, outputs if gate is None else outputs // 2)
        if num_rows:
            check(result, wanted(x, exact(values, scales, None, 128), None, gate))


@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_logits_are_not_rounded(num_rows: int):
    values, scales, zeros = made(136, 128, 128, 8, False, DEVICE)
    x = random(num_rows, 128, dtype=torch.bfloat16)
    found = packed.linear(x, pack(values, scales, zeros, 128, 8), out_dtype=torch.float32)
    assert found.dtype == torch.float32
    expected = wanted(x, exact(values, scales, zeros, 128), None, None)
    step = 1e-4 if num_rows <= 64 else 2e-2  # of more the weights are rounded, after scaling
    torch.testing.assert_close(found.double(), expected, rtol=step, atol=step)


@pytest.mark.parametrize("shape", [(4096, 4096, False), (12288, 4096, True), (4096, 12288, False), (64, 64, False)])
def test_choices_fit_every_shape(shape: Shape):
    for rows in ROW_CLASSES:
        choice = packed_choice(rows, shape, 4)
        assert choice.block_m >= min(rows, 64)
        assert choice.split_k == 1 or shape[1] // choice.split_k >= 512
        assert choice.split_k > 1 or choice.slices or rows > 64 or shape != (4096, 4096, False)
        if shape != (64, 64, False):
            assert candidates(rows, shape)


@pytest.mark.parametrize(("dtype", "late"), [(torch.bfloat16, True), (torch.float16, False), (torch.float32, True)])
def test_floats_of_4_bits(dtype: torch.dtype, late: bool):
    """Every value, and every product exact to float32."""
    generator = torch.Generator().manual_seed(0)
    values = HALVES[torch.randint(16, (72, 256), generator=generator)].to(DEVICE)
    values[0, :16] = HALVES.to(DEVICE)
    scales = 2.0 ** torch.randint(-4, 4, (72, 8), generator=generator).to(DEVICE)
    weight = pack(values, scales, None, 32, 4, halves=True)
    exactly = exact(values, scales, None, 32)
    assert torch.equal(floats(weight, torch.float32), exactly)
    assert torch.equal(packed.floats(weight, torch.float32), exactly)
    x = random(3, 256, dtype=dtype)
    expected = wanted(x, exactly, None, None)
    check(packed_rows(x, weight, replace(PLAIN, late=late)), expected)
    check(packed_gemv(x[:1], weight, PackedChoice(1, 8, 4, 1, slices=2)), expected[:1])
