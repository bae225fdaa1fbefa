"""What is read of a GPTQ checkpoint: integers as they are in the file where kernels take them so."""

import pytest
import torch

from pagemill.model.loading.nibble_weight import NibbleWeight
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
    word = sum(zero << 4 * place for place in range(8))
    return {
        "qweight": torch.randint(-(1 << 31), 1 << 31, (WIDTH // 8, ROWS), generator=generator).int(),
        "qzeros": torch.full((WIDTH // GROUP, ROWS // 8), word, dtype=torch.int32),
        "scales": torch.rand(WIDTH // GROUP, ROWS, generator=generator).half(),
        "g_idx": (torch.arange(WIDTH) // GROUP).int(),
    }


def floats(tensors: dict[str, torch.Tensor], zero: int = 8) -> torch.Tensor:
    """[ROWS, WIDTH], by the definition."""
    places = torch.arange(WIDTH)
    integers = tensors["qweight"].long()[places // 8] >> (places % 8 * 4)[:, None] & 15
    return ((integers - zero).float() * tensors["scales"].float()[places // GROUP]).t()


WHOLE = WeightPart((ROWS, WIDTH), range(ROWS), range(WIDTH))


@pytest.mark.parametrize("columns", [range(WIDTH), range(32, 64), range(20, 52)], ids=str)
def test_central_zeros_leave_integers_as_they_are(columns: range) -> None:
    tensors = stored()
    part = WeightPart((ROWS, WIDTH), range(ROWS), columns)
    first = columns.start // 8
    read = {
        name: tensor[columns.start // GROUP : -(-columns.stop // GROUP)] if name in ("qzeros", "scales") else tensor
        for name, tensor in tensors.items()
    }
    read["qweight"] = tensors["qweight"][first : -(-columns.stop // 8)]
    found = weights().decode(read, part, torch.bfloat16)
    assert isinstance(found, NibbleWeight)
    assert torch.equal(found.dequantized(torch.float32), floats(tensors)[:, columns.start : columns.stop])


@pytest.mark.parametrize("case", ["other zeros", "ordered", "no panels"])
def test_integers_are_taken_apart_otherwise(case: str) -> None:
    tensors = stored(5 if case == "other zeros" else 7)
    made = weights(takes_blocks=case != "no panels", ordered=case == "ordered")
    found = made.decode(tensors, WHOLE, torch.bfloat16)
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.dequantized(torch.float32), floats(tensors, 6 if case == "other zeros" else 8))
