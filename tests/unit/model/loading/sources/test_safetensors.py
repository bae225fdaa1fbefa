"""Weights of safetensors files: what is read, and what stays mapped."""

import gc
import json
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.model.loading.file_tensor import FileTensor
from pagemill.model.loading.load_place import ALONE, LoadPlace
from pagemill.model.loading.part import Part
from pagemill.model.loading.sources import safetensors as source

IN_FILES = LoadPlace(leaves_in_files=True)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    matrices = {f"layers.{i}.weight": torch.randn(32, 64, generator=generator) for i in range(10)}
    return matrices | {f"layers.{i}.norm": torch.randn(64, generator=generator) for i in range(10)}


@pytest.fixture
def facts(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    return ModelFacts("m", str(tmp_path), "safetensors", "LlamaForCausalLM", {}, "float32", 64, 8)


def is_mapped(facts):
    return f"{facts.path}/model.safetensors" in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("num_bytes", [1, 10_000, 1 << 30])
def test_every_tensor_is_read_once_however_often_the_file_is_mapped(facts, tensors, monkeypatch, num_bytes):
    monkeypatch.setattr(source, "_FORGET_BYTES", num_bytes)
    loaded = list(source.iterate(facts, torch.float32, 0))
    assert sorted(name for name, _ in loaded) == sorted(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded)


def test_matrices_are_mapped_and_vectors_do_not_keep_the_file(facts):
    loaded = dict(source.iterate(facts, torch.float32, 0))
    assert is_mapped(facts)
    vectors = {name: tensor for name, tensor in loaded.items() if tensor.ndim == 1}
    del loaded
    gc.collect()
    assert len(vectors) == 10
    assert not is_mapped(facts)


def test_a_missing_file(facts):
    (Path(facts.path) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        list(source.iterate(facts, torch.float32, 0))


ANYTHING = [
    None, True, -1, 2**63, 2**64, "", [], {}, "F32", "F4", "F8_E8M0", [[1]], [-1], [0, 2**62], [2**62, 2**62], ["x"],
    [128, 0], "\x00", "x" * 10_000, [1] * 100,
]  # fmt: skip


def changed_file(rng, content):
    """The content with another value in its header, another length of it, fewer bytes, or a few other bytes."""
    (length,) = struct.unpack("<Q", content[:8])
    kind = rng.randrange(4)
    if kind == 0:
        header = json.loads(content[8 : 8 + length])
        tensor = header[rng.choice(sorted(header))]
        tensor[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(ANYTHING)
        raw = json.dumps(header).encode()
        return struct.pack("<Q", len(raw)) + raw + content[8 + length :]
    if kind == 1:
        return struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 1 << 31, (1 << 64) - 1])) + content[8:]
    if kind == 2:
        return content[: rng.randrange(len(content))]
    several = bytearray(content)
    for _ in range(4):
        several[rng.randrange(len(several))] = rng.randrange(256)
    return bytes(several)


@pytest.mark.parametrize("place", [ALONE, IN_FILES])
def test_headers_that_hold_anything(facts, place):
    rng = random.Random(0)
    path = Path(facts.path) / "model.safetensors"
    save_file({"a": torch.zeros(4, 8), "b": torch.ones(8)}, path)
    content = path.read_bytes()
    num_good = 0
    for _ in range(300):
        path.write_bytes(changed_file(rng, content))
        try:
            found = [tensor for _, tensor in source.iterate(facts, torch.float32, 0, place=place)]
            num_good += len([tensor.read() for tensor in found if isinstance(tensor, FileTensor)]) <= 2
        except ModelError as error:
            assert len(str(error)) < 600
            assert "\n" not in str(error)
    assert 0 < num_good < 300


def test_tensors_are_left_in_the_files_in_their_order(facts, tensors):
    found = list(source.iterate(facts, torch.float32, 0, place=IN_FILES))
    assert all(isinstance(tensor, FileTensor) for _, tensor in found)
    assert sorted(name for name, _ in found) == sorted(tensors)
    offsets = [tensor.offset for _, tensor in found]
    assert offsets == sorted(offsets)
    assert not is_mapped(facts)
    assert all(torch.equal(tensor.read(), tensors[name]) for name, tensor in found)


def test_rows_are_left_in_the_files_and_columns_are_mapped(facts, tensors):
    def select(name, shape):
        return Part(1, 16, 48) if name in ("layers.1.weight", "layers.2.weight") else Part(0, 3, 11)

    found = dict(source.iterate(facts, torch.float32, 0, select, IN_FILES))
    assert {name for name, tensor in found.items() if isinstance(tensor, torch.Tensor)} == {
        "layers.1.weight",
        "layers.2.weight",
    }
    for name, tensor in found.items():
        read = tensor.read() if isinstance(tensor, FileTensor) else tensor
        assert torch.equal(read, select(name, ()).of(tensors[name]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_types_that_are_seldom_are_mapped(tmp_path, dtype):
    values = torch.arange(6).reshape(2, 3).to(dtype)
    save_file({"x": values, "y": torch.ones(2, 2), "z": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    facts = ModelFacts("m", str(tmp_path), "safetensors", "LlamaForCausalLM", {}, "float32", 64, 8)
    found = dict(source.iterate(facts, torch.float32, 0, place=IN_FILES))
    assert torch.equal(found["x"], values)
    assert torch.equal(found["y"].read(), torch.ones(2, 2))
    assert found["z"].read() == 3
