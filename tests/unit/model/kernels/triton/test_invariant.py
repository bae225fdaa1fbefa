"""Products in one sum: right, and on a GPU the same bits for a row in any company."""

import pytest
import torch

from tests.fakes.triton_interpreter import DEVICE  # isort: skip

from pagemill.model.kernels import reference
from pagemill.model.kernels.triton import invariant
from pagemill.model.kernels.triton.one_sum_choices import (
    MANY,
    MOST_EARLY,
    early_class,
    early_tiles,
    few_class,
    many_tiles,
)
from tests.marks import slow

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def check_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The interpreter multiplies by NumPy, whose sums do depend on the number of rows."""
    step = 0.0 if DEVICE == "cuda" else 2e-3
    torch.testing.assert_close(found, expected, rtol=step, atol=step * 10)


@pytest.mark.parametrize(("gate", "biased"), [slow(None, True), ("silu", False), slow("gelu_tanh", True)])
def test_linear(gate: str | None, biased: bool) -> None:
    x, weight = noise(140, 72), noise(96, 72, seed=1)
    bias = noise(96, seed=2) if biased else None
    whole = invariant.linear(x, weight, bias, gate)
    expected = reference.linear(x.float(), weight.float(), None if bias is None else bias.float(), gate)
    torch.testing.assert_close(whole.float(), expected, rtol=2e-2, atol=2e-2)
    for rows in (1, 17, 65, 129):
        check_bits(invariant.linear(x[:rows], weight, bias, gate), whole[:rows])


def test_sums_that_are_not_rounded_and_rows_of_a_wider_tensor() -> None:
    x, weight = noise(3, 83)[:, 2:74], noise(40, 72, seed=1)
    found = invariant.linear(x, weight, out_dtype=torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x.float() @ weight.float().T, rtol=1e-4, atol=1e-3)
    assert invariant.linear(x[:0], weight).shape == (0, 40)


def test_tiles_follow_the_number_of_rows() -> None:
    assert [few_class(rows) for rows in (1, 16, 17, 64, 65, 128)] == [16, 16, 32, 64, 128, 128]
    assert many_tiles(256, 4096, 132, 2) is MANY[0]
    assert many_tiles(8192, 4096, 132, 2) is MANY[-1]
    assert many_tiles(8192, 4096, 132, 4).outputs <= 128


@pytest.mark.parametrize("rows", [1, MOST_EARLY])
@pytest.mark.parametrize(
    ("shape", "warps"),
    [((4096, 4096, False), 2), ((6144, 4096, False), 3), ((12288, 4096, True), 3), ((128, 2048, False), 1)],
)
def test_outputs_are_divided_evenly_over_multiprocessors(shape: tuple[int, int, bool], warps: int, rows: int) -> None:
    tiles = early_tiles(rows, shape, 132)
    assert tiles.warps == warps
    held = (16 * warps * (2 if shape[2] else 1) + early_class(rows)) * tiles.inputs * 2 * tiles.stages
    assert held < 227 << 10
    assert tiles.stages >= 6


def test_a_ring_is_not_longer_than_its_programs_turns() -> None:
    assert early_tiles(1, (96, 72, True), 132).stages == 1
    assert early_tiles(1, (2048, 2048, False), 132).stages * early_tiles(1, (2048, 2048, False), 132).inputs == 2048
