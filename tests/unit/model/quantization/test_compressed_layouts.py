"""What is read of 4-bit integers with zero points: codes as they are in the file where kernels take them so."""

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.linear_int import Q4_1
from pagemill.model.loading.nibble_weight import NibbleWeight
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.stored import WeightPart
from pagemill.model.quantization.compressed_layouts import PackedIntegers, Scheme
from pagemill.model.quantization.integers import Integers
from pagemill.model.quantization.interface import LinearWeight, QuantMethod
from pagemill.model.quantization.ordered import OrderedWeight
from pagemill.model.quantization.panels import PanelWeight
from pagemill.model.quantization.scale_grid import ScaleGrid
from pagemill.model.quantization.unquantized import Unquantized

GROUP, ROWS, WIDTH = 32, 44, 192


def tensors() -> dict[str, Tensor]:
    """Of a file: any integers and zero points; ROWS is no multiple of the 8 zero points of a word."""
    generator = torch.Generator().manual_seed(0)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).int()

    scales = torch.rand(ROWS, WIDTH // GROUP, generator=generator).bfloat16()
    return {
        "weight_packed": words(ROWS, WIDTH // 8),
        "weight_scale": scales,
        "weight_zero_point": words(-(-ROWS // 8), WIDTH // GROUP),
    }


def floats(stored: dict[str, Tensor], groups: Tensor | None = None) -> Tensor:
    """[ROWS, WIDTH], by the definition."""
    groups = torch.arange(WIDTH) // GROUP if groups is None else groups
    shifts = 4 * torch.arange(8)
    integers = (stored["weight_packed"].unsqueeze(-1) >> shifts & 15).flatten(1)
    zeros = (stored["weight_zero_point"].unsqueeze(1) >> shifts[:, None] & 15).flatten(0, 1)[:ROWS]
    return (integers - zeros[:, groups]).float() * stored["weight_scale"].float()[:, groups]


def decoded(computing: QuantMethod, part: WeightPart, groups: Tensor | None = None) -> NibbleWeight | PackedWeight:
    """`groups`: weight_g_idx, where there is one."""
    scheme = Scheme(4, ScaleGrid(1, GROUP), symmetric=False, ordered=groups is not None)
    method = PackedIntegers(scheme, computing)
    stored = tensors() if groups is None else {**tensors(), "weight_g_idx": groups.int()}
    read = {}
    for one in method.tensors(part.shape):
        wanted = one.part_for(part)
        if one.kind in stored and wanted is not None:
            read[one.kind] = wanted.of(stored[one.kind])
    found = method.decode(read, part, torch.bfloat16)
    assert isinstance(found, NibbleWeight | PackedWeight)
    return found


def part_of(rows: range | None = None, columns: range | None = None) -> WeightPart:
    return WeightPart((ROWS, WIDTH), rows or range(ROWS), columns or range(WIDTH))


@pytest.mark.parametrize(
    "part",
    [
        part_of(),
        part_of(range(22)),
        part_of(range(22, 44)),  # begins within a word of zero points
        part_of(columns=range(96)),
        part_of(columns=range(96, 192)),
    ],
    ids=str,
)
def test_zero_points_leave_integers_as_they_are(part: WeightPart) -> None:
    expected = floats(tensors())[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
    found, plain = decoded(Integers(quantize_floats=False), part), decoded(Unquantized(), part)
    check_as_they_are(found, plain, expected, PanelWeight)


def check_as_they_are(found: object, plain: object, expected: torch.Tensor, kind: type[LinearWeight]) -> None:
    """`found` holds integers as the file does, `plain` those that PyTorch took apart; both make the same panels."""
    assert isinstance(found, NibbleWeight)
    assert isinstance(plain, PackedWeight)
    assert torch.equal(found.dequantized(torch.float32), expected)
    assert torch.equal(plain.dequantized(torch.float32), expected)
    if packs_natively():
        check_same_panels(found, plain, kind)


def check_same_panels(found: NibbleWeight, plain: PackedWeight, kind: type[LinearWeight]) -> None:
    """Made of what files hold, and of integers that PyTorch has taken apart."""
    made = [Integers(quantize_floats=False).prepare(one) for one in (found, plain)]
    assert all(isinstance(one, kind) for one in made)
    mine, theirs = (one.native(None) for one in made)
    assert mine is not None and theirs is not None
    assert mine.struct.format == Q4_1.panels
    for one, other in zip(mine.tensors, theirs.tensors, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("part", [part_of(), part_of(range(22, 44)), part_of(columns=range(64, 192))], ids=str)
def test_inputs_in_an_order_of_their_own_leave_integers_as_they_are(part: WeightPart) -> None:
    # A part of the inputs has all of some groups' and none of the others'.
    groups = torch.arange(WIDTH) // GROUP
    for each in (groups[:64], groups[64:]):
        each.copy_(each[torch.randperm(len(each), generator=torch.Generator().manual_seed(1))])
    expected = floats(tensors(), groups)[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
    found, plain = (decoded(one, part, groups) for one in (Integers(quantize_floats=False), Unquantized()))
    check_as_they_are(found, plain, expected, OrderedWeight)


def test_integers_are_taken_apart_where_a_part_begins_within_a_byte() -> None:
    part = part_of(columns=range(33, 97))
    found = decoded(Integers(quantize_floats=False), part)
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.dequantized(torch.float32), floats(tensors())[:, 33:97])
