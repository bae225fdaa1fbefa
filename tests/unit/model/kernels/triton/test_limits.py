"""What is no number stays none, within limits and as the largest; as torch has it. The interpreter's minimum passes NaN
on by itself: there only the largest of a row can fail."""

import pytest
import torch
import triton
import triton.language as tl

from tests.fakes.triton_interpreter import DEVICE

from pagemill.model.kernels.moe import ExpertForm  # isort: skip
from pagemill.model.kernels.triton.gated import gate_times
from pagemill.model.kernels.triton.limits import largest, within

NAN, INF = float("nan"), float("inf")


@triton.jit
def _limits(values, inside, sizes, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(values + row)
    tl.store(inside + row, within(value, 2.0))
    tl.store(sizes + tl.program_id(0), largest(value, 0))


@triton.jit
def _gate(out, gates, ups, COLUMNS: tl.constexpr):
    lanes = tl.arange(0, COLUMNS)
    tl.store(out + lanes, gate_times(tl.load(gates + lanes), tl.load(ups + lanes), False, True, 1.702, 7.0))


def test_limits_and_the_largest():
    rows = [[1.0, -3.0, 0.5, 2.0], [1.0, NAN, -3.0, 4.0], [-INF, 0.0, 1.0, 2.5], [NAN, INF, 0.0, -0.0]]
    values = torch.tensor(rows, device=DEVICE)
    inside, sizes = torch.empty_like(values), torch.empty(4, device=DEVICE)
    _limits[(4,)](values, inside, sizes, COLUMNS=4)
    torch.testing.assert_close(inside, values.clamp(-2, 2), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(sizes, values.abs().amax(1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("which", [0, 1])
def test_a_clamped_gate(which: int):
    pair = torch.ones(2, 4, device=DEVICE)
    pair[which, 1] = NAN
    out = torch.empty(4, device=DEVICE)
    _gate[(1,)](out, *pair, COLUMNS=4)
    expected = ExpertForm(clamp=(1.702, 7.0)).gated(pair.flatten()[None])[0]
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert out[1].isnan()
