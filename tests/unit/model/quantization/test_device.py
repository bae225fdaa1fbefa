"""Which quantized weights have kernels on a GPU, and what these hold."""

from dataclasses import replace

import pytest
import torch

from pagemill.model.kernels.moe import reference_experts
from pagemill.model.kernels.packed import HALVES
from pagemill.model.loading.packed_weight import Inputs, PackedWeight, neighbours
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.device import DeviceWeights, GroupedWeight
from pagemill.model.quantization.device_experts import DeviceExperts
from pagemill.model.quantization.eight_bits import EightBitsWeight
from pagemill.model.quantization.interface import ExpertSizes
from pagemill.model.quantization.ordered import OrderedWeight
from pagemill.model.quantization.small_floats import HALVES_BITS
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
    assert held.packed.bits == (4 if bits <= 4 else 8)
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


@pytest.mark.parametrize("width", [256, 96])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_floats_become_integers_of_8_bits_if_asked_for(width: int, gate: str | None):
    plain = torch.randn(48, width) / width**0.5
    plain[5] = 0
    held = DeviceWeights(torch.float32, quantize_floats=True).prepare(plain, gate)
    assert isinstance(held, GroupedWeight)
    assert held.packed.bits == 8
    assert not held.gives_rows, "an embedding keeps the floats"
    x = torch.randn(3, width)
    expected = torch.nn.functional.linear(x, plain)
    if gate is None:
        found = held.logits(x.bfloat16())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.03)
    else:
        first, second = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(first) * second
    torch.testing.assert_close(held.apply(x, None), expected, rtol=0.02, atol=0.03)


def test_floats_of_other_widths_stay(caplog: pytest.LogCaptureFixture):
    held = DeviceWeights(torch.float32, quantize_floats=True).prepare(torch.randn(48, 100))
    assert isinstance(held, PlainWeight)
    assert "layers of 100 inputs stay floats" in caplog.text


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


SIZES = ExpertSizes(3, 128, 64)


def experts_of(
    *weights: tuple[QuantizedTensor | torch.Tensor, QuantizedTensor | torch.Tensor], sizes: ExpertSizes = SIZES
) -> DeviceExperts:
    made = DeviceWeights(torch.float32).experts(sizes, torch.float32, torch.device("cpu"), "silu")
    assert isinstance(made, DeviceExperts)
    for index, (gate_up, down) in enumerate(weights):
        made.put_gate_up(index, gate_up)
        made.put_down(index, down)
    return made


def pair(bits: int, size: int, seed: int, inner: int = 64) -> tuple[PackedWeight, PackedWeight]:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for outputs, inputs in ((2 * inner, 128), (128, inner)):
        if bits == HALVES_BITS:
            values = HALVES[torch.randint(16, (outputs, inputs), generator=generator)]
        else:
            values = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, generator=generator)
        scales = torch.rand(outputs, -(-inputs // size), generator=generator) / 30
        parts.append(PackedWeight(bits, values, scales, neighbours(inputs, size), halves=bits == HALVES_BITS))
    return parts[0], parts[1]


def check_experts(made: DeviceExperts, *weights: tuple[QuantizedTensor | torch.Tensor, ...]) -> None:
    plain = [torch.stack([floats(part[which], torch.float32) for part in weights]) for which in (0, 1)]
    x = torch.randn(5, plain[0].shape[2], generator=torch.Generator().manual_seed(9))
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0], [5, 2]], dtype=torch.int32)
    factors = torch.rand(5, 2)
    expected = reference_experts(x, plain[0], plain[1], chosen, factors, 0)
    torch.testing.assert_close(made.apply(x, chosen, factors, 0), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 64), (8, 64), (HALVES_BITS, 32)])
def test_experts_are_kept_as_they_are_stored(bits: int, size: int):
    weights = [pair(bits, size, seed) for seed in range(3)]
    made = experts_of(*weights)
    assert made.gate_up.packed is not None
    assert made.down.packed is not None
    assert made.gate_up.packed.like.bits == (8 if bits == 8 else 4)
    assert made.gate_up.packed.like.halves == (bits == HALVES_BITS)
    check_experts(made, *weights)


@pytest.mark.parametrize("bits", [4, 8, HALVES_BITS])
def test_experts_of_no_whole_tiles_are_padded(bits: int):
    weights = [pair(bits, 32, seed, inner=96) for seed in range(3)]
    made = experts_of(*weights, sizes=ExpertSizes(3, 128, 96))
    assert made.gate_up.form == made.down.form == "packed"
    check_experts(made, *weights)
    made.gate_up.dequantize()
    check_experts(made, *weights)


@pytest.mark.parametrize("size", [None, 128])
@pytest.mark.parametrize("inner", [128, 192])
def test_experts_of_8_bit_floats_keep_their_scales(size: int | None, inner: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    generator = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(3):
        parts = []
        for outputs, inputs in ((2 * inner, 256), (256, inner)):
            values = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
            scales = torch.rand(outputs, 1 if size is None else -(-inputs // size), generator=generator) / 9
            parts.append(PackedWeight(8, values, scales, neighbours(inputs, size or inputs)))
        weights.append((parts[0], parts[1]))
    made = experts_of(*weights, sizes=ExpertSizes(3, 256, inner))
    assert made.gate_up.form == made.down.form == "floats of 8 bits"
    assert torch.equal(made.down.plain[1].view(torch.int8), weights[1][1].values.view(torch.int8))
    check_experts(made, *weights)
    made.down.dequantize()
    check_experts(made, *weights)


def test_experts_of_different_forms_are_dequantized():
    of_four, of_eight = pair(4, 32, 0), pair(8, 64, 1)
    plain = tuple(part.dequantized(torch.float32) for part in pair(4, 32, 2))
    for weights in ([of_four, of_eight, of_four], [of_four, plain, of_eight], [plain, of_four, of_eight]):
        made = experts_of(*weights)
        assert made.gate_up.form == made.down.form == "floats"
        check_experts(made, *weights)
    mixed = [(of_four[0], of_eight[1])] * 3
    made = experts_of(*mixed)
    assert made.gate_up.form == "packed"
    check_experts(made, *mixed)
    unlike = [(of_four[0], plain[1])] * 3
    made = experts_of(*unlike)
    check_experts(made, *unlike)
    assert made.gate_up.form == "floats"
