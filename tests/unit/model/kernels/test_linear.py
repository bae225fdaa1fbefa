"""Linear layers on packed weights: against torch, and independent of the batch and of threads, to the last bit."""

import pytest
import torch
from torch.nn import functional

from pagemill.model.kernels.linear import GELU_TANH, SILU, linear, pack_bf16, with_bias
from pagemill.model.kernels.ops import gated
from pagemill.model.kernels.pack_linear import NO_GATE, PANEL, panel_rows
from tests.marks import slow

pytestmark = pytest.mark.cases(one_in=12)


def random_case(rows: int, outputs: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    return x, (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).bfloat16()


@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("inputs", [2, slow(64), 66, slow(1000)])
@pytest.mark.parametrize("rows", [1, slow(2), 11, slow(13), 70])
def test_it_is_the_product(isa: str, rows: int, outputs: int, inputs: int) -> None:
    x, weight = random_case(rows, outputs, inputs)
    expected = x.float() @ weight.float().T
    packed = pack_bf16(weight)
    torch.testing.assert_close(linear(x, packed, torch.float32), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(linear(x, packed).float(), expected, rtol=2e-2, atol=2e-2)


def test_more_rows_than_fit_a_chunk(isa: str) -> None:
    x, weight = random_case(700, 96, 512)
    torch.testing.assert_close(
        linear(x, pack_bf16(weight), torch.float32), x.float() @ weight.float().T, rtol=2e-3, atol=2e-3
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_alone_equals_the_row_in_any_company(isa: str, threads: int) -> None:
    x, weight = random_case(50, 80, 256)
    packed = pack_bf16(weight)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = linear(x, packed, torch.float32)
        for begin, end in ((0, 1), (49, 50), (3, 5), (7, 20), (0, 37)):
            assert torch.equal(linear(x[begin:end], packed, torch.float32), together[begin:end])
    finally:
        torch.set_num_threads(before)


def test_rows_may_be_slices_of_a_wider_tensor(isa: str) -> None:
    x, weight = random_case(9, 40, 64)
    wide = torch.full((9, 200), torch.nan, dtype=torch.bfloat16)
    wide[:, 100:164] = x
    assert torch.equal(linear(wide[:, 100:164], pack_bf16(weight)), linear(x, pack_bf16(weight)))


def test_the_bias_is_added_before_rounding(isa: str) -> None:
    x, weight = random_case(5, 45, 64)
    bias = torch.randn(45).bfloat16()
    found = linear(x, with_bias(pack_bf16(weight), bias), torch.float32)
    torch.testing.assert_close(found, functional.linear(x.float(), weight.float(), bias.float()), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("gate", "name"), [(SILU, "silu"), (GELU_TANH, "gelu_tanh")])
@pytest.mark.parametrize("half", [16, 5, 48, 100])
def test_a_gate_equals_the_activation_after_the_product(isa: str, gate: int, name: str, half: int) -> None:
    x, weight = random_case(14, 2 * half, 128)
    separate = gated(linear(x, pack_bf16(weight)), name)
    found = linear(x, pack_bf16(weight, gate=gate))
    assert found.shape == (14, half)
    assert torch.equal(found, separate)


@pytest.mark.parametrize("outputs", [PANEL, 70, 1])
def test_a_packed_weight_can_be_had_back(outputs: int) -> None:
    _, weight = random_case(1, outputs, 48)
    unpacked = pack_bf16(weight).tensors[0].transpose(1, 2).reshape(-1, weight.shape[1])[: len(weight)]
    assert torch.equal(unpacked, weight)


@pytest.mark.parametrize("gate", [NO_GATE, SILU])
@pytest.mark.parametrize(("rows", "cols", "offset"), [(64, 8, 0), (70, 6, 0), (96, 10, 1), (2, 2, 1)])
def test_panels_are_the_rows_in_pairs_of_inputs(gate: int, rows: int, cols: int, offset: int) -> None:
    """Also of a weight whose numbers begin at no multiple of 32 bits."""
    weight = torch.randn(offset + rows * cols).bfloat16()[offset:].view(rows, cols)
    expected = panel_rows(weight, gate).view(-1, PANEL, cols // 2, 2).transpose(1, 2)
    assert torch.equal(pack_bf16(weight, None, gate).tensors[0], expected)
