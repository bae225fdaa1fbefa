"""AutoRound's checkpoints: which layers are quantized how, by name."""

from typing import Any

import pytest
import torch

from pagemill.errors import ModelError
from pagemill.model.quantization.awq import AwqWeights
from pagemill.model.quantization.choose import choose
from pagemill.model.quantization.interface import Quantization, Role

CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def made(**changes: Any) -> Quantization:
    return choose(None, CONFIG | changes, torch.float32, "cpu")


def stored(quantization: Quantization, module: str, role: Role = Role.LINEAR) -> dict[str, tuple[int, ...]]:
    return {tensor.kind: tensor.shape for tensor in quantization.method(module, role).tensors((256, 512))}


def test_linear_layers_are_quantized_and_nothing_else() -> None:
    assert stored(made(), UP)["qweight"] == (512 // 8, 256)
    assert stored(made(), UP)["scales"] == (4, 256)
    for module, role in (("model.embed_tokens", Role.EMBEDDING), ("lm_head", Role.HEAD), ("a.gate", Role.ROUTER)):
        assert "qweight" not in stored(made(), module, role)


@pytest.mark.parametrize(
    "extra", [{DOWN: {"bits": 16}}, {DOWN: {"bits": 16, "data_type": "float"}}, {r".*down_proj": {"bits": 16}}]
)
def test_a_layer_may_be_left_as_it_is(extra: dict[str, Any]) -> None:
    quantization = made(extra_config=extra)
    assert "qweight" not in stored(quantization, DOWN)
    assert "qweight" in stored(quantization, UP)


@pytest.mark.parametrize("name", [DOWN, r"layers\.0\.mlp\.down", r"^model.*down_proj"])
def test_a_layer_may_have_bits_and_groups_of_its_own(name: str) -> None:
    quantization = made(extra_config={name: {"bits": 8, "group_size": 32}, "lm_head": {"bits": 4}})
    assert stored(quantization, DOWN)["qweight"] == (512 // 4, 256)
    assert stored(quantization, DOWN)["scales"] == (16, 256)
    assert stored(quantization, UP)["qweight"] == (512 // 8, 256)
    assert "qweight" in stored(quantization, "lm_head", Role.HEAD)


@pytest.mark.parametrize("blocks", ["model.layers,model.more", ["model.layers"]])
def test_blocks_that_are_quantized(blocks: Any) -> None:
    quantization = made(block_name_to_quantize=blocks)
    assert "qweight" in stored(quantization, UP)
    assert "qweight" not in stored(quantization, "model.connector.up_proj")


def test_the_layout_of_awq() -> None:
    quantization = made(packing_format="auto_round:auto_awq")
    assert isinstance(quantization.method(UP, Role.LINEAR), AwqWeights)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format"),
        ({"bits": 5}, "bits=5"),
        ({"bits": None}, "bits"),
        ({"data_type": "mx_fp"}, "data_type"),
        ({"act_bits": 8}, "act_bits=8"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "bits=8"),
        ({"block_name_to_quantize": 5}, "block_name_to_quantize=5"),
        ({"extra_config": [1]}, "extra_config"),
        ({"extra_config": {DOWN: {"bits": 7}}}, "down_proj.bits=7"),
        ({"extra_config": {DOWN: 4}}, "down_proj=4"),
        ({"extra_config": {"(a+)+": {"bits": 8}}}, "could take long"),
        (
            {"extra_config": {f"a.*b.*{index}!": {"bits": 8} for index in range(100)}},
            "the 100 patterns in quantization_config could take long",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError) as refused:
        made(**changes)
    assert field in str(refused.value)


def test_experts_in_one_tensor_are_floats_whatever_pattern_fits_their_name() -> None:
    quantization = made(extra_config={r".*experts.*": {"bits": 8}})
    assert list(stored(quantization, "layers.0.mlp.experts", Role.STACKED)) == ["weight"]
    assert "qweight" in stored(quantization, "model.layers.0.mlp.experts.0.up_proj")
