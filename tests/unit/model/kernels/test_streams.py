"""Streams of hidden states in native code against torch, per instruction set."""

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels.streams import (
    AddedToOthers,
    Bounded,
    CorrectedStreams,
    MeanOfStreams,
    MixedStreams,
    OneOfStreams,
    SideBySide,
    SparseGate,
    StreamFunction,
    WeighedRows,
)
from tests.unit.model.kernels.cpu.test_rows import assert_near, noise

pytestmark = pytest.mark.cases(one_in=8)

COUNTS = [2, 3, 4]
SIZES = [(1, 64), (3, 100), (40, 7), (0, 16), (1, 2048)]
"""Rows, and elements of a stream."""


def rows(*shape: int, seed: int = 0) -> Tensor:
    return noise(*shape, dtype=torch.bfloat16, seed=seed)


def check(function: StreamFunction, *tensors: Tensor) -> None:
    """In native code and in torch, the same but for roundings; and the same bits on one thread as on three."""
    found = function(*tensors)
    assert found.is_contiguous()
    assert_near(found, function.in_torch(*tensors))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 3)
        assert torch.equal(function(*tensors), found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_streams_side_by_side_and_their_mean(isa: str, count: int, size: tuple[int, int]) -> None:
    parts = [rows(*size, seed=seed) * (seed + 1) for seed in range(count)]
    check(SideBySide(), *parts)
    check(MeanOfStreams(count), SideBySide().in_torch(*parts))


def test_a_stream_of_zeros_stays_one(isa: str) -> None:
    check(SideBySide(), rows(3, 48), torch.zeros(3, 48, dtype=torch.bfloat16))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_one_stream(isa: str, count: int, size: tuple[int, int]) -> None:
    streams = rows(size[0], count, size[1])
    scale = rows(size[1], seed=1)
    for index in range(count):
        check(OneOfStreams(count, index), streams)
        check(OneOfStreams(count, index, lambda: scale), streams)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_predictions_and_corrections(isa: str, count: int, size: tuple[int, int]) -> None:
    num_rows, width = size
    streams = rows(num_rows, count, width)
    computed = rows(num_rows, width, seed=2)
    for active in range(count):
        check(CorrectedStreams(count, active), streams, computed, rows(num_rows, count, seed=3))
    check(AddedToOthers(count), streams, computed)
    # Sums are rounded in native code as in float32, which torch's product of matrices need not do.
    coefficients = rows(num_rows, count**2, seed=4)
    wide = MixedStreams(count).in_torch(streams.float(), coefficients.float())
    torch.testing.assert_close(MixedStreams(count)(streams, coefficients).float(), wide, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("size", SIZES)
def test_bounds(isa: str, size: tuple[int, int]) -> None:
    check(Bounded(3.0), rows(*size))
    check(Bounded(0.25), rows(*size))


@pytest.mark.parametrize("size", SIZES)
def test_weighed_rows(isa: str, size: tuple[int, int]) -> None:
    check(WeighedRows(), rows(*size), rows(size[0], 1, seed=1))


@pytest.mark.parametrize("deviations", [-0.7, 0.0, 1.6])
@pytest.mark.parametrize("size", SIZES)
def test_sparse_gates(isa: str, size: tuple[int, int], deviations: float) -> None:
    gates = rows(size[0], 2 * size[1])
    function = SparseGate(deviations)
    found, wanted = function(gates), function.in_torch(gates)
    # A gate near the limit may be rounded to either side of what is nearest to it.
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-8)
    assert found.numel() == 0 or (found == 0).float().mean() > 0.1


def test_a_mean_over_ranks_is_left_to_torch() -> None:
    gates = rows(2, 32)
    function = SparseGate(0.5, lambda part: part.mean(-1, keepdim=True) * 2)
    assert torch.equal(function(gates), function.in_torch(gates))


def test_other_types_are_left_to_torch(isa: str) -> None:
    streams = noise(3, 4, 16)
    assert MeanOfStreams(4)(streams).dtype == torch.float32
    torch.testing.assert_close(MeanOfStreams(4)(streams), streams.mean(1))
