"""The operation that a compiler sees does what the function does."""

import pytest
import torch

from pagemill.model.kernels import packed, packed_op
from tests.unit.model.kernels.packed_cases import made


@pytest.mark.parametrize("gate", [None, "silu"])
def test_the_operation_is_the_function(gate: str | None):
    values, scales, zeros = made(64, 96, 32, 4, True)
    weight = packed.pack(values, scales, zeros, 32, 4)
    x = torch.randn(3, 96)
    bias = torch.randn(64)
    result = packed_op.traced_linear(x, weight, bias, gate)
    assert torch.equal(result, packed.linear(x, weight, bias, gate))
    sizes = (weight.words, weight.scales, weight.offsets, bias, 64, 4, 32, False, gate or "")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert packed_op.packed_linear(mode.from_tensor(x), *sizes).shape == result.shape
