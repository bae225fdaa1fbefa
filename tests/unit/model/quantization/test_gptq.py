"""What is read of a GPTQ checkpoint: integers as they are in the file where kernels take them so."""

import pytest
import torch

from pagemill.model.loading.nibble_weight import WordWeight
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.stored import WeightPart
from pagemill.model.quantization.gptq import GptqLayout, GptqWeights
from pagemill.model.quantization.integers import Integers
from pagemill.model.quantization.unquantized import Unquantized

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


@pytest.mark.parametrize("case", ["no panels", "begins within a word", "ends within a word"])
def test_integers_are_taken_apart_otherwise(case: str) -> None:
    tensors = stored(5)
    columns = {"begins within a word": range(20, 52), "ends within a word": range(0, 36)}.get(case, range(WIDTH))
    part = WeightPart((ROWS, WIDTH), range(ROWS), columns)
    found = weights(takes_blocks=case != "no panels").decode(read(tensors, columns), part, torch.bfloat16)
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.dequantized(torch.float32), floats(tensors, 6)[:, columns.start : columns.stop])
