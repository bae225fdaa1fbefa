"""What weights of every quantized checkpoint are read into, against the same weights as floats."""

import dataclasses

import pytest
import torch

from pagemill.model.kernels.linear_int import FLOAT8, NF4, NF4_LEVELS, Q4_0, Q4_1, Q8_0
from pagemill.model.loading.packed_weight import Inputs, PackedWeight, neighbours
from pagemill.model.loading.quantized_tensor import stacked, with_rows


def random_weight(bits: int = 4, zeros: bool = True, groups: torch.Tensor | None = None) -> PackedWeight:
    generator = torch.Generator().manual_seed(bits)
    half = 1 << bits - 1
    values = torch.randint(-half, half, (6, 128), generator=generator).to(torch.int8)
    scales = torch.rand(6, 4, generator=generator).add_(0.5).bfloat16()
    zero_points = torch.randint(-half, half, (6, 4), generator=generator).to(torch.int8) if zeros else None
    return PackedWeight(bits, values, scales, neighbours(128, 32) if groups is None else groups, zero_points)


def expected(weight: PackedWeight) -> torch.Tensor:
    made = torch.empty(weight.shape)
    for column, group in enumerate(weight.groups.tolist()):
        zero = 0.0 if weight.zeros is None else weight.zeros[:, group].float()
        made[:, column] = (weight.values[:, column].float() - zero) * weight.scales[:, group].float()
    return made


@pytest.mark.parametrize(
    ("bits", "zeros", "kind"), [(4, False, Q4_0), (4, True, Q4_1), (2, True, Q4_1), (6, False, Q8_0)]
)
def test_blocks_hold_the_same_weight(bits: int, zeros: bool, kind: object) -> None:
    weight = random_weight(bits, zeros)
    assert torch.equal(weight.dequantized(torch.float32), expected(weight))
    blocks = weight.as_blocks()
    assert blocks is not None
    assert blocks.kind is kind
    # A minimum is a 16-bit float: of up to 16 steps, it is off by less than a hundredth of one.
    step = weight.scales.float().max() / 100
    assert (blocks.dequantized(torch.float32) - expected(weight)).abs().max() <= (step if zeros else 0)


def test_bytes_with_zero_points_are_blocks_where_the_difference_is_a_byte() -> None:
    weight = random_weight(6)
    blocks = weight.as_blocks()
    assert blocks is not None
    assert blocks.kind is Q8_0
    assert torch.equal(blocks.dequantized(torch.float32), expected(weight))
    assert random_weight(8).as_blocks() is None
    assert dataclasses.replace(weight, zeros=weight.scales).as_blocks() is None  # which are no integers


def test_inputs_are_sorted_by_their_groups() -> None:
    groups = neighbours(128, 32)[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    weight = random_weight(groups=groups)
    assert weight.as_blocks() is None
    assert weight.group_size is None
    ordered, order = weight.sorted_inputs()
    assert order is not None
    assert ordered.as_blocks() is not None
    assert ordered.group_size == 32
    assert torch.equal(ordered.dequantized(torch.float32), expected(weight)[:, order])
    assert random_weight().sorted_inputs()[1] is None


def test_weights_are_stacked_where_their_groups_are_the_same() -> None:
    parts = [random_weight(), random_weight(8, zeros=False)]
    both = stacked(parts, torch.float32)
    assert isinstance(both, PackedWeight)
    assert both.bits == 8
    assert torch.equal(both.dequantized(torch.float32), torch.cat([expected(part) for part in parts]))
    for other in (
        random_weight(groups=neighbours(128, 64)),
        dataclasses.replace(parts[0], inputs=Inputs.INT8),
        random_weight().as_blocks(),
        expected(parts[0]).bfloat16(),
    ):
        assert other is not None
        mixed = stacked([parts[0], other], torch.bfloat16)
        assert isinstance(mixed, torch.Tensor)
        assert mixed.dtype == torch.bfloat16
        assert torch.equal(mixed[:6], expected(parts[0]).bfloat16())


def test_rows_of_eight_bit_floats_are_arranged_as_bytes() -> None:
    values = torch.randn(6, 64).to(torch.float8_e4m3fn)
    weight = PackedWeight(8, values, torch.rand(6, 2), neighbours(64, 32))
    found = with_rows(weight, lambda rows: torch.nn.functional.pad(rows.flip(0), (0, 0, 0, 2)))
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.dequantized(torch.float32)[:6], expected(weight).flip(0))
    assert found.shape == (8, 64)


def test_groups_of_a_part_begin_with_its_first() -> None:
    assert neighbours(6, 4, first=6).tolist() == [0, 0, 1, 1, 1, 1]
    assert neighbours(3, 10**40).tolist() == [0, 0, 0]
    assert random_weight(groups=neighbours(128, 48)).group_size == 48
    assert random_weight(groups=torch.zeros(128, dtype=torch.int64)).group_size == 128


def test_blocks_of_eight_bit_floats_hold_the_same_numbers() -> None:
    values = torch.randn(6, 64).to(torch.float8_e4m3fn)
    weight = PackedWeight(8, values, torch.rand(6, 2).half(), neighbours(64, 32))
    blocks = weight.as_blocks()
    assert blocks is not None
    assert blocks.kind is FLOAT8
    assert torch.equal(blocks.dequantized(torch.float32), expected(weight))
    values.view(torch.uint8)[3, 5] = 0x7F  # NaN
    assert weight.as_blocks() is None


def test_indices_of_nf4_are_blocks_and_others_are_not() -> None:
    levels = torch.tensor(NF4_LEVELS)
    weight = dataclasses.replace(random_weight(zeros=False), levels=levels)
    wanted = levels[weight.values.int() + 8] * weight.scales.float()[:, weight.groups]
    assert torch.equal(weight.dequantized(torch.float32), wanted)
    blocks = weight.as_blocks()
    assert blocks is not None
    assert blocks.kind is NF4
    assert ((blocks.dequantized(torch.float32) - wanted).abs() <= wanted.abs() * 2**-8).all()  # of bfloat16
    assert dataclasses.replace(weight, levels=levels.flip(0)).as_blocks() is None
    both = stacked([weight, weight], torch.float32)
    assert isinstance(both, PackedWeight)
    assert torch.equal(both.dequantized(torch.float32), torch.cat([wanted, wanted]))
    assert isinstance(stacked([weight, random_weight(zeros=False)], torch.float32), torch.Tensor)


def test_what_the_log_says_of_it() -> None:
    weight = random_weight()
    assert weight.description == "4-bit integers in groups of 32"
    small_floats = dataclasses.replace(weight, bits=5, zeros=None, halves=True)
    assert small_floats.description == "4-bit floats in groups of 32"
    assert stacked([small_floats, small_floats], torch.float32).description == "4-bit floats in groups of 32"
