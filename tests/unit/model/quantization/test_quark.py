"""Quark's checkpoints: which layers are quantized how, by name."""

from typing import Any

import pytest
import torch

from pagemill.errors import ModelError
from pagemill.model.quantization.choose import choose
from pagemill.model.quantization.interface import Quantization, Role

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def made(weight: Any = FP8, **changes: Any) -> Quantization:
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": FP8}, "exclude": []}
    return choose(None, config | changes, torch.float32, "cpu")


def dtype_of(quantization: Quantization, module: str, role: Role = Role.LINEAR) -> torch.dtype:
    tensors = {tensor.kind: tensor for tensor in quantization.method(module, role).tensors((64, 128))}
    return tensors["weight"].dtypes[0]


@pytest.mark.parametrize(
    ("weight", "dtype"),
    [(FP8, torch.float8_e4m3fn), (FP8 | {"dtype": "int8", "qscheme": "per_channel"}, torch.int8), (MX, torch.uint8)],
)
def test_linear_layers_are_quantized_and_nothing_else(weight: Any, dtype: torch.dtype) -> None:
    assert dtype_of(made(weight), UP) == dtype
    for module, role in (("model.embed_tokens", Role.EMBEDDING), ("lm_head", Role.HEAD)):
        assert dtype_of(made(weight), module, role) != dtype


@pytest.mark.parametrize("excluded", [DOWN, "*down_proj", r"re:.*down_proj"])
def test_a_layer_may_be_left_as_it_is(excluded: str) -> None:
    quantization = made(exclude=["lm_head", excluded])
    assert dtype_of(quantization, UP) == torch.float8_e4m3fn
    assert dtype_of(quantization, DOWN) != torch.float8_e4m3fn


def test_a_layer_may_have_a_format_of_its_own() -> None:
    quantization = made(layer_quant_config={"*down_proj": {"weight": MX}, "*up_proj": {"weight": None}})
    assert dtype_of(quantization, DOWN) == torch.uint8
    assert dtype_of(quantization, UP) != torch.float8_e4m3fn
    assert dtype_of(quantization, "model.layers.0.mlp.gate_proj") == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weight": FP8 | {"dtype": "int4"}}, "weight.dtype='int4'"),
        ({"weight": FP8 | {"qscheme": "per_group"}}, "qscheme='per_group'"),
        ({"weight": FP8 | {"is_dynamic": True}}, "is_dynamic"),
        ({"weight": FP8 | {"symmetric": False}}, "symmetric"),
        ({"weight": MX | {"group_size": 16}}, "group_size=16"),
        ({"weight": [FP8, MX]}, "weight="),
        ({"global_quant_config": None}, "global_quant_config is missing"),
        ({"layer_quant_config": {"*q": {"weight": FP8 | {"dtype": 5}}}}, "dtype=5"),
        ({"layer_type_quant_config": {"nn.Linear": {}}}, "layer_type_quant_config"),
        ({"exclude": ["*" * 9]}, "patterns"),
        ({"exclude": "lm_head"}, "exclude"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError) as refused:
        made(**changes)
    assert field in str(refused.value)
