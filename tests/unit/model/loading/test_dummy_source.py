"""Dummy weights: what a checkpoint would hold, the same for the same seed."""

import dataclasses

import pytest
import torch

from pagemill.artifacts.describe import describe
from pagemill.config.sections import ModelConfig
from pagemill.model.factory import load_model
from pagemill.model.loading.sources.dummy import iterate
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.tiny_checkpoint import SPECIFIC, make_checkpoint


@pytest.mark.parametrize("architecture", SPECIFIC)
def test_every_architecture_loads_without_weights(tmp_path, architecture):
    folder = make_checkpoint(tmp_path, architecture)
    (folder / "model.safetensors").unlink()
    facts = describe("m", folder, load_format="dummy")
    config = ModelConfig("m", dtype="float32", load_format="dummy", max_model_len=64)
    assert load_model(facts, config, CpuPlatform(), PhaseTimer()).cache_layers()


def test_the_seed_decides(tmp_path):
    facts = dataclasses.replace(describe("m", make_checkpoint(tmp_path, "LlamaForCausalLM")))
    first, again, other = (dict(iterate(facts, torch.float32, seed)) for seed in (1, 1, 2))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
