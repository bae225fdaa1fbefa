"""What a layer expects of a checkpoint: the tensors of its format, its weight as floats, or an error."""

import pytest
import torch

from pagemill.errors import ModelError
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.weight_reader import WeightReader
from pagemill.model.loading.stored import WeightPart
from pagemill.model.quantization.gptq import GptqLayout, GptqWeights
from pagemill.model.quantization.interface import QuantMethod, Uniform
from pagemill.model.quantization.transposed import Transposed
from pagemill.model.quantization.unquantized import Unquantized

ROWS, WIDTH = 24, 64


def gptq() -> GptqWeights:
    return GptqWeights(GptqLayout(4, 16, ordered=False, zero_offset=1), Unquantized())


def reader(method: QuantMethod, rows: int = ROWS, width: int = WIDTH) -> WeightReader:
    ctx = LayerContext(torch.float32, Uniform(method), lambda *_: pytest.fail("no attention"))
    return WeightReader(ctx, [WeightPart((rows, width), range(rows), range(width))])


def kinds(method: QuantMethod, rows: int = ROWS) -> set[str]:
    return {tensor.stored.kind for tensor in reader(method, rows).tensors(0)}


def test_a_format_declares_its_own_tensors() -> None:
    assert {"qweight", "qzeros", "scales"} <= kinds(gptq())


def test_a_shape_that_a_format_cannot_store_is_floats() -> None:
    assert kinds(gptq(), rows=7) == {"weight"}  # words hold the zero points of eight outputs
    weight = torch.randn(7, WIDTH)
    assert torch.equal(reader(gptq(), rows=7).take("weight", 0, weight), weight)


def test_floats_come_in_the_place_of_what_a_format_stores() -> None:
    weight = torch.randn(ROWS, WIDTH)
    assert torch.equal(reader(gptq()).take("weight", 0, weight), weight)


def test_floats_as_inputs_by_outputs_are_turned() -> None:
    (declared,) = reader(Transposed(Unquantized())).tensors(0)
    assert declared.stored.shape == (WIDTH, ROWS)
    weight = torch.randn(WIDTH, ROWS)
    assert torch.equal(reader(Transposed(Unquantized())).take("weight", 0, weight), weight.T)


def test_quantized_weights_as_inputs_by_outputs_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"stores them as \[in, out\]"):
        kinds(Transposed(gptq()))
