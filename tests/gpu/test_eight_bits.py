"""Products with 8-bit floats in blocks and with W8A8 integers, compiled: against float32, run to run, and in graphs."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from pagemill.model.kernels.eight_bits import EightBits, floats, integers, linear, reference_quantize
from tests.fakes.triton_interpreter import DEVICE
from tests.unit.model.kernels.eight_bits_cases import blocks

from pagemill.model.kernels.triton import eight_bits, launch  # isort: skip
from pagemill.model.kernels.triton.norm import rms_norm  # isort: skip

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")]
SHAPES = [(6144, 4096, None), (4096, 12288, None), (24576, 4096, "silu"), (1040, 1504, None)]
"""Outputs, inputs, gate."""
ROWS = (1, 3, 17, 32, 33, 37, 70, 101, 256, 1023)


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "dependent"])
def launches(request) -> Iterator[None]:
    before = launch.dependent()
    launch.set_dependent(request.param)
    yield
    launch.set_dependent(before)


def weight_of(kind: str, outputs: int, inputs: int) -> EightBits:
    if kind == "blocks":
        return blocks(outputs, inputs, shared=True, device="cuda")
    values = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
    return integers(values, (torch.rand(outputs, device="cuda") + 0.5) / 128 / inputs**0.5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["blocks", "integers"])
def test_every_number_of_rows(kind: str, shape):
    outputs, inputs, gate = shape
    weight = weight_of(kind, outputs, inputs)
    plain = floats(weight, torch.float32)
    for rows in ROWS:
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        exact = x.float()
        if eight_bits.quantizes(x, weight):
            numbers, factors = reference_quantize(x, weight.group, weight.values.dtype)
            exact = floats(EightBits(numbers, factors, weight.group, 1), torch.float32)
        expected = functional.linear(exact, plain)
        if gate is not None:
            first, second = expected.chunk(2, -1)
            expected = functional.silu(first) * second
        result = linear(x, weight, None, gate)
        assert (result.float() - expected).norm() < 6e-3 * expected.norm(), rows
        assert torch.equal(result, linear(x, weight, None, gate))


@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize("kind", ["blocks", "integers"])
def test_in_a_captured_graph(kind: str, rows: int):
    weight = weight_of(kind, 4096, 4096)
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    expected = linear(x, weight).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = linear(x, weight)
    for _ in range(3):
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("count", [33, 100, 2048])
@pytest.mark.parametrize("kind", ["blocks", "integers"])
def test_a_norm_quantizes_its_result(kind: str, count: int):
    weight = weight_of(kind, 1040, 4096)
    x, residual = torch.randn(2, count, 4096, device="cuda").bfloat16()
    norm = torch.randn(4096, device="cuda").bfloat16(), 1e-6
    expected = linear(rms_norm(x, *norm, residual.clone()), weight).float()
    result = eight_bits.norm_linear(x, residual, norm, weight).float()
    # Its sum of squares may be formed in another order, which moves a few numbers to their neighbours.
    assert (result - expected).norm() < 2e-3 * expected.norm()
