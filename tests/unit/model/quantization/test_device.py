"""Which quantized weights have kernels on a GPU, and what these hold."""

from dataclasses import replace

import pytest
import torch

from pagemill.model.loading.packed_weight import Inputs, PackedWeight, neighbours
from pagemill.model.quantization.device import DeviceWeights, GroupedWeight
from pagemill.model.quantization.eight_bits import EightBitsWeight
from pagemill.model.quantization.ordered import OrderedWeight
from pagemill.model.quantization.unquantized import PlainWeight
from tests.unit.model.kernels.packed_cases import made


def weight_of(bits: int, size: int, with_zeros: bool = False) -> PackedWeight:
    values, scales, zeros = made(48, 128, size, 4 if bits <= 4 else 8, with_zeros)
    return PackedWeight(bits, values, scales, neighbours(128, size), zeros)


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 128), (8, 64), (3, 32), (6, 96)])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_integers_in_groups_are_kept(bits: int, size: int, with_zeros: bool):
    weight = weight_of(bits, size, with_zeros)
    held = DeviceWeights(torch.float32).prepare(weight)
    assert isinstance(held, GroupedWeight)
    assert held.weight.bits == (4 if bits <= 4 else 8)
    x = torch.randn(3, 128)
    expected = torch.nn.functional.linear(x, weight.dequantized(torch.float32))
    torch.testing.assert_close(held.apply(x, None), expected, rtol=1e-4, atol=1e-4)
    indices = torch.tensor([3, 47, 3, 0])
    torch.testing.assert_close(held.rows(indices), weight.dequantized(torch.float32)[indices])


def test_ordered_inputs_are_arranged_once():
    weight = weight_of(4, 32)
    mixed = replace(weight, groups=weight.groups[torch.randperm(128)])
    held = DeviceWeights(torch.float32).prepare(mixed)
    assert isinstance(held, OrderedWeight)
    x = torch.randn(3, 128)
    expected = torch.nn.functional.linear(x, mixed.dequantized(torch.float32))
    torch.testing.assert_close(held.apply(x, None), expected, rtol=1e-4, atol=1e-4)


def test_what_the_kernels_cannot_hold_is_dequantized():
    zeros = weight_of(4, 32, True)
    assert zeros.zeros is not None
    for weight in (weight_of(4, 16), replace(zeros, zeros=zeros.zeros + 0.5)):
        held = DeviceWeights(torch.float32).prepare(weight)
        assert isinstance(held, PlainWeight)
        assert torch.equal(held.weight, weight.dequantized(torch.float32))


@pytest.mark.parametrize("gate", [None, "silu"])
def test_integers_whose_inputs_are_integers_are_kept_as_they_are(gate: str | None):
    weight = replace(weight_of(8, 128), inputs=Inputs.INT8)
    held = DeviceWeights(torch.float32).prepare(weight, gate)
    assert isinstance(held, EightBitsWeight)
    assert torch.equal(held.weight.values, weight.values)
    x = torch.randn(3, 128)
    expected = torch.nn.functional.linear(x, weight.dequantized(torch.float32))
    if gate is not None:
        first, second = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(first) * second
    torch.testing.assert_close(held.apply(x, None), expected, rtol=1e-4, atol=1e-4)
