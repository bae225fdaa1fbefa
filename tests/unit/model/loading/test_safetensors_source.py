"""Weights of safetensors files: what is read, and what stays mapped."""

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.model.loading.sources import safetensors as source


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
