"""What is read of a GPTQ checkpoint: integers as they are in the file where kernels take them so."""

import pytest
import torch

from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.linear_int import Q8_0
from pagemill.model.kernels.linear_reference import unpacked_blocks
from pagemill.model.loading.nibble_weight import WordWeight
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.stored import WeightPart
from pagemill.model.quantization.gptq import GptqLayout, GptqWeights
from pagemill.model.quantization.integers import Integers
from pagemill.model.quantization.unquantized import Unquantized
from tests.fakes import stored_formats

GROUP, ROWS, WIDTH = 16, 24, 64


def weights(*, takes_blocks: bool = True, ordered: bool = False) -> GptqWeights:
    computing = Integers(quantize_floats=False) if takes_blocks else Unquantized()
    return GptqWeights(GptqLayout(4, GROUP, ordered=ordered, zero_offset=1), computing)


def stored(zero: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "qweight": torch.randint(-(1 << 31), 1 << 31, (WIDTH // 8, ROWS), generator=generator).int(),
        "qzeros": torch.full((WIDTH // GROUP, ROWS // 2), zero * 17, dtype=torch.uint8).view(torch.int32),
        "scales": torch.rand(WIDTH // GROUP, ROWS, generator=generator).half(),
        "g_idx": (torch.arange(WIDTH) // GROUP).int(),
    }


def floats(tensors: dict[str, torch.Tensor], zero: int = 8) -> torch.Tensor:
    """[ROWS, WIDTH], by the definition."""
    places = torch.arange(WIDTH)
    integers = tensors["qweight"].long()[places // 8] >> (places % 8 * 4)[:, None] & 15
    return ((integers - zero).float() * tensors["scales"].float()[tensors["g_idx"].long()]).t()


WHOLE = WeightPart((ROWS, WIDTH), range(ROWS), range(WIDTH))


def read(tensors: dict[str, torch.Tensor], columns: range) -> dict[str, torch.Tensor]:
    """What a rank with these columns reads."""
    groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
    return {
        "qweight": tensors["qweight"][columns.start // 8 : -(-columns.stop // 8)],
        "qzeros": tensors["qzeros"][groups],
        "scales": tensors["scales"][groups],
        "g_idx": tensors["g_idx"],
    }


@pytest.mark.parametrize("zero", [7, 5, 15])
@pytest.mark.parametrize("columns", [range(WIDTH), range(32, 64), range(16, 56)], ids=str)
def test_words_stay_as_they_are_in_the_file(columns: range, zero: int) -> None:
    tensors = stored(zero)
    mine = read(tensors, columns)
    found = weights().decode(mine, WeightPart((ROWS, WIDTH), range(ROWS), columns), torch.bfloat16)
    assert isinstance(found, WordWeight)
    assert found.words.data_ptr() == mine["qweight"].data_ptr()
    assert (found.zeros is None) == (zero == 7)
    expected = floats(tensors, (zero + 1) % 16)[:, columns.start : columns.stop]
    assert torch.equal(found.dequantized(torch.float32), expected)


def test_inputs_in_an_order_of_their_own() -> None:
    tensors = stored(5)
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    shuffled = {**tensors, "g_idx": tensors["g_idx"][order]}
    found = weights(ordered=True).decode(shuffled, WHOLE, torch.bfloat16)
    assert isinstance(found, WordWeight)
    assert torch.equal(found.groups, order // GROUP)
    assert torch.equal(found.dequantized(torch.float32), floats(shuffled, 6))


def eight_bits(zero: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a file has of integers of 8 bits, and the weight [ROWS, WIDTH], by the definition."""
    generator = torch.Generator().manual_seed(2)
    integers = torch.randint(0, 256, (WIDTH, ROWS), generator=generator)
    groups = (torch.arange(WIDTH) // GROUP)[torch.randperm(WIDTH, generator=generator)]
    scales = torch.rand(WIDTH // GROUP, ROWS, generator=generator).half()
    in_words = integers.view(-1, 4, ROWS) << (8 * torch.arange(4))[:, None]
    read = {
        "qweight": in_words.sum(1).to(torch.int32),
        "qzeros": torch.full((WIDTH // GROUP, ROWS), zero - 1, dtype=torch.uint8).view(torch.int32),
        "scales": scales,
        "g_idx": groups.int(),
    }
    return read, ((integers - zero).float() * scales.float()[groups]).t()


@pytest.mark.parametrize("zero", [128, 100])
def test_integers_of_8_bits(zero: int) -> None:
    read, expected = eight_bits(zero)
    found, plain = (
        GptqWeights(GptqLayout(8, GROUP, ordered=True, zero_offset=1), computing).decode(read, WHOLE, torch.bfloat16)
        for computing in (Integers(quantize_floats=False), Unquantized())
    )
    assert isinstance(found, WordWeight) == (zero == 128)
    assert isinstance(found, WordWeight | PackedWeight)
    assert isinstance(plain, PackedWeight)
    assert torch.equal(found.dequantized(torch.float32), expected)
    assert torch.equal(plain.dequantized(torch.float32), expected)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("ordered", [False, True])
def test_panels_of_8_bits_are_those_of_integers_taken_apart(size: int, ordered: bool) -> None:
    if not packs_natively():
        return
    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    read, _ = stored_formats.gptq(weight, 8, size, ordered=ordered)
    read["qzeros"] = torch.full_like(read["qzeros"], 0x7F7F7F7F)
    layout = GptqLayout(8, size, ordered=ordered, zero_offset=1)
    found, plain = (
        GptqWeights(layout, computing).decode(read, WHOLE, torch.bfloat16)
        for computing in (Integers(quantize_floats=False), Unquantized())
    )
    assert isinstance(found, WordWeight)
    assert isinstance(plain, PackedWeight)
    made = Integers(quantize_floats=False).prepare(found).native(None)
    assert made is not None
    blocks = plain.sorted_inputs()[0].as_blocks()
    assert blocks is not None
    assert torch.equal(unpacked_blocks(Q8_0, made.tensors[0], (ROWS, WIDTH)).flatten(1), blocks.blocks)


@pytest.mark.parametrize("case", ["no panels", "begins within a word", "ends within a word"])
def test_integers_are_taken_apart_otherwise(case: str) -> None:
    tensors = stored(5)
    columns = {"begins within a word": range(20, 52), "ends within a word": range(0, 36)}.get(case, range(WIDTH))
    part = WeightPart((ROWS, WIDTH), range(ROWS), columns)
    found = weights(takes_blocks=case != "no panels").decode(read(tensors, columns), part, torch.bfloat16)
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.dequantized(torch.float32), floats(tensors, 6)[:, columns.start : columns.stop])
