"""Parameters by the headers of files: what the tensors hold, of quantized ones what they stand for."""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest

from pagemill.artifacts.parameter_count import parameter_count
from pagemill.config.facts import ModelFacts
from tests.fakes.engine import FACTS
from tests.unit.artifacts.gguf_builder import write_gguf

AWQ = {"quant_method": "awq", "bits": 4}
GROUPS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}


def facts_of(path: Path, quantization: dict[str, Any] | None = None, weights_format: str = "safetensors") -> ModelFacts:
    return dataclasses.replace(
        FACTS, path=str(path), weights_format=weights_format, quantization_config=quantization or {}
    )


def write(path: Path, **tensors: tuple[str, list[int]]) -> None:
    """A .safetensors file that ends behind its header."""
    header = {name.replace("__", "."): {"dtype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_of_one_file_and_of_those_that_the_index_names(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", a__weight=("BF16", [10, 4]), a__bias=("F32", [10]), ids=("I64", [99]))
    assert parameter_count(facts_of(tmp_path)) == 50
    write(tmp_path / "model-2.safetensors", b__weight=("F16", [3, 3]))
    index = {"weight_map": {"a.weight": "model.safetensors", "b.weight": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert parameter_count(facts_of(tmp_path)) == 59


def test_of_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    wanted = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(path).tensors)
    assert parameter_count(facts_of(path, weights_format="gguf")) == wanted > 0


@pytest.mark.parametrize(
    ("config", "tensors", "expected"),
    [
        (AWQ, {"q__qweight": ("I32", [64, 4]), "q__qzeros": ("I32", [2, 4]), "q__scales": ("F16", [2, 32])}, 2048),
        (GROUPS, {"q__weight_packed": ("I32", [8, 4]), "q__weight_scale": ("F32", [8]), "n__bias": ("F16", [5])}, 133),
        ({"quant_method": "fp8"}, {"q__weight": ("F8_E4M3", [8, 4]), "q__weight_scale_inv": ("F32", [1, 1])}, 32),
        ({"quant_method": "mxfp4"}, {"e__up_blocks": ("U8", [2, 8, 16]), "e__up_scales": ("U8", [2, 8])}, 512),
        ({"quant_method": "bitsandbytes"}, {"q__weight": ("U8", [50, 1]), "q__weight__absmax": ("U8", [9])}, 100),
        ({"quant_method": "awq"}, {"q__qweight": ("I32", [64, 4])}, None),
    ],
)  # fmt: skip
def test_of_quantized_checkpoints(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], expected: int | None
) -> None:
    write(tmp_path / "model.safetensors", **tensors)
    assert parameter_count(facts_of(tmp_path, config)) == expected


def test_what_cannot_be_counted(tmp_path: Path) -> None:
    assert parameter_count(facts_of(tmp_path)) is None
    for content in (b"", b"\xff" * 9, struct.pack("<Q", 4) + b"[{}]", struct.pack("<Q", 8) + b'{"a": 1}'):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert parameter_count(facts_of(tmp_path)) is None
    assert parameter_count(facts_of(tmp_path / "model.safetensors", weights_format="gguf")) is None
    assert parameter_count(facts_of(tmp_path, weights_format="dummy")) is None
