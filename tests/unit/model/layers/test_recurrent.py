"""The weights of a short convolution, of the channels that a rank holds."""

import pytest
import torch

from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.recurrent import Convolution
from pagemill.model.quantization.interface import Uniform
from pagemill.model.quantization.unquantized import Unquantized

WEIGHT = torch.arange(24.0).reshape(6, 1, 4)
BIAS = torch.arange(6.0)


def context(dtype=torch.float32):
    def attention(spec, name):
        raise AssertionError("a convolution has no attention")

    return LayerContext(dtype, Uniform(Unquantized()), attention)


@pytest.mark.parametrize("held", [[0, 1, 2, 3, 4, 5], [4, 5, 1]])
def test_channels_in_the_order_in_which_they_are_held(held):
    layer = Convolution(6, 4, torch.tensor(held), bias=True, ctx=context())
    stored = {tensor.stored.kind: tensor.stored.shape for tensor in layer.checkpoint_tensors()}
    assert stored == {"weight": (6, 1, 4), "bias": (6,)}
    layer.load("weight", 0, WEIGHT)
    layer.load("bias", 0, BIAS)
    assert layer.channels == len(held)
    assert torch.equal(layer.weight, WEIGHT[held, 0])
    assert torch.equal(layer.bias, BIAS[held])


def test_factors_are_taken_into_the_weight_before_it_is_rounded():
    held = torch.tensor([2, 0])
    factors = torch.tensor([0.1, 3.0])
    layer = Convolution(6, 4, held, bias=False, ctx=context(torch.bfloat16), factors=factors)
    assert [tensor.stored.kind for tensor in layer.checkpoint_tensors()] == ["weight"]
    layer.load("weight", 0, WEIGHT)
    assert layer.bias is None
    assert torch.equal(layer.weight, (WEIGHT[held, 0] * factors[:, None]).bfloat16())
