"""Products of 8-bit floats by cuBLAS in tiles of our choice, on the GPU: against torch's, and in graphs."""

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels.cublas_lt import Kind
from pagemill.model.kernels.fp8_tiles import MOST_ROWS, multiply
from tests.fakes.cublas_library import quantized
from tests.fakes.triton_interpreter import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"),
]
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (2048, 8192), (1024, 512), (1600, 512)]
ROWS = (2, 8, 17, 32, 33, 40, 64, 65, 100, 128, 192, 256, 257, 384, MOST_ROWS)


def operands(kind: Kind, rows: int, outputs: int, size: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, size, device="cuda"), torch.randn(outputs, size, device="cuda") / size**0.5
    return quantized(kind, x, weight)


def by_torch(kind: Kind, rows: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> Tensor:
    by_rows = kind is Kind.FP8_ROWS
    result: Tensor = torch._scaled_mm(
        rows[0],
        weight[0].t(),
        scale_a=rows[1].unsqueeze(1) if by_rows else rows[1].t(),
        scale_b=weight[1].unsqueeze(0) if by_rows else weight[1],
        out_dtype=torch.bfloat16,
        use_fast_accum=by_rows,
    )
    return result


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", list(Kind)[1:])
def test_results_are_torchs(kind: Kind, shape: tuple[int, int]):
    for count in ROWS:
        rows = count if kind is Kind.FP8_ROWS else -(-count // 8) * 8
        given = operands(kind, rows, *shape)
        found, expected = multiply(kind, *given), by_torch(kind, *given)
        assert found is not None, rows
        difference = (found.float() - expected.float()).norm() / expected.float().norm()
        assert difference < 5e-3, rows
        again = multiply(kind, *given)
        assert again is not None and torch.equal(found, again), rows


@pytest.mark.parametrize("count", [40, 128, 256, 512])
@pytest.mark.parametrize("kind", list(Kind)[1:])
def test_in_a_captured_graph(kind: Kind, count: int):
    rows, weight = operands(kind, count, 4096, 4096)
    expected = multiply(kind, rows, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = multiply(kind, rows, weight)
    assert found is not None and expected is not None
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
