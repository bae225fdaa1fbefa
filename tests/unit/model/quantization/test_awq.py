"""What is read of an AWQ checkpoint: words as they are in the file where kernels take them so, and the same panels."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.linear_int import BLOCK
from pagemill.model.loading.nibble_weight import WordWeight
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.stored import WeightPart
from pagemill.model.quantization.awq import AwqWeights
from pagemill.model.quantization.integers import Integers
from pagemill.model.quantization.interface import QuantMethod
from pagemill.model.quantization.panels import PanelWeight
from pagemill.model.quantization.unquantized import Unquantized
from tests.fakes import stored_formats

GROUP, WIDTH = 64, 256


def tensors_of(rows: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """What a file holds of a weight [rows, WIDTH], and the weight as floats."""
    weight = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return stored_formats.awq(weight, GROUP)


def decoded(computing: QuantMethod, tensors: dict[str, Tensor], part: WeightPart) -> WordWeight | PackedWeight:
    """What a rank makes of its part of the tensors."""
    method = AwqWeights(GROUP, computing)
    read = {}
    for stored in method.tensors(part.shape):
        wanted = stored.part_for(part)
        assert wanted is not None
        read[stored.kind] = wanted.of(tensors[stored.kind])
    found = method.decode(read, part, torch.bfloat16)
    assert isinstance(found, WordWeight | PackedWeight)
    return found


def part_of(rows: int, mine: range | None = None, columns: range | None = None) -> WeightPart:
    return WeightPart((rows, WIDTH), mine or range(rows), columns or range(WIDTH))


PARTS = pytest.mark.parametrize(
    ("part", "as_stored"),
    [
        (part_of(48), True),
        (part_of(48, range(24)), True),
        (part_of(48, range(24, 48)), True),
        (part_of(48, range(16, 32)), True),
        (part_of(48, range(12, 24)), False),  # begins within a word
        (part_of(48, range(8, 20)), False),
        (part_of(48, columns=range(128)), True),
        (part_of(48, columns=range(128, 256)), True),
        (part_of(48, columns=range(96, 160)), True),  # begins within a group
    ],
    ids=str,
)


@PARTS
def test_words_stay_as_they_are_in_the_file(part: WeightPart, as_stored: bool) -> None:
    tensors, weight = tensors_of(48)
    expected = weight[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
    found = decoded(Integers(quantize_floats=False), tensors, part)
    assert isinstance(found, WordWeight) == as_stored
    plain = decoded(Unquantized(), tensors, part)
    assert isinstance(plain, PackedWeight)
    for one in (found, plain):
        torch.testing.assert_close(one.dequantized(torch.float32), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.dequantized(torch.float32), plain.dequantized(torch.float32))


def panels_of(parts: Sequence[WordWeight | PackedWeight], gate: str | None) -> Tensor:
    made = Integers(quantize_floats=False).prepare_stacked(parts, torch.bfloat16, gate)
    assert isinstance(made, PanelWeight)
    return made.native(None).tensors[0]


@pytest.mark.parametrize(
    ("sizes", "ranks", "gate"),
    [
        ((48,), 1, None),
        ((128, 32, 32), 1, None),
        ((128, 32, 32), 2, None),
        ((112, 56, 56), 2, None),  # words that both ranks need
        ((80, 80), 1, "silu"),
        ((80, 80), 2, "silu"),
        ((176, 176), 4, "silu"),
    ],
    ids=str,
)
def test_panels_are_those_of_integers_taken_apart(sizes: tuple[int, ...], ranks: int, gate: str | None) -> None:
    if not packs_natively():
        pytest.skip("this machine computes no integers natively")
    tensors = [tensors_of(size, seed)[0] for seed, size in enumerate(sizes)]
    for rank in range(ranks):
        parts = [part_of(size, range(size // ranks * rank, size // ranks * (rank + 1))) for size in sizes]
        found, plain = (
            [decoded(method, *one) for one in zip(tensors, parts, strict=True)]
            for method in (Integers(quantize_floats=False), Unquantized())
        )
        assert torch.equal(panels_of(found, gate), panels_of(plain, gate))


@pytest.mark.parametrize("columns", [range(BLOCK), range(128), range(96, 256)], ids=str)
def test_panels_of_a_part_of_the_inputs(columns: range) -> None:
    if not packs_natively():
        pytest.skip("this machine computes no integers natively")
    tensors, _ = tensors_of(72)
    part = part_of(72, columns=columns)
    found, plain = (decoded(method, tensors, part) for method in (Integers(quantize_floats=False), Unquantized()))
    assert torch.equal(panels_of([found], None), panels_of([plain], None))
