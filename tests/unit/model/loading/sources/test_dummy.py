"""Dummy weights: what a checkpoint would hold, the same for the same seed."""

import pytest
import torch

from pagemill.artifacts.describe import describe
from pagemill.model.factory import load_model
from pagemill.model.loading.part import Part, whole
from pagemill.model.loading.sources.dummy import iterate
from pagemill.model.loading.stored import StoredTensor
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.configs import model_config
from tests.fakes.tiny_checkpoint import SPECIFIC, make_checkpoint


@pytest.mark.parametrize("architecture", SPECIFIC)
def test_every_architecture_loads_without_weights(tmp_path, architecture):
    folder = make_checkpoint(tmp_path, architecture)
    (folder / "model.safetensors").unlink()
    facts = describe("m", folder, load_format="dummy")
    config = model_config("m", dtype="float32", load_format="dummy", max_model_len=64)
    assert load_model(facts, config, CpuPlatform(), PhaseTimer()).cache_layers()


class Wanted:
    """A model that needs these tensors, and selects a part of each."""

    def __init__(self, tensors, select=whole):
        self._tensors, self._select = tensors, select

    def tensors(self):
        return self._tensors.items()

    def __call__(self, name, shape):
        return self._select(name, shape)


NAME, SHAPE = "model.layers.0.mlp.up_proj.weight", (8, 6)


def made(stored, seed=1, select=whole, dtype=torch.float32):
    return dict(iterate(None, dtype, seed, Wanted({NAME: stored}, select)))[NAME]


def test_the_seed_decides():
    weight = StoredTensor("weight", SHAPE)
    assert torch.equal(made(weight), made(weight))
    assert not torch.equal(made(weight), made(weight, seed=2))


def test_a_part_is_that_of_the_whole_and_does_not_keep_it():
    weight = StoredTensor("weight", SHAPE)
    half = made(weight, select=lambda name, shape: Part(1, 3, 6))
    assert torch.equal(half, made(weight)[:, 3:])
    assert half.untyped_storage().nbytes() == half.numel() * 4


def test_types_and_values_are_those_of_the_checkpoint():
    """Floats in the model's type where they may be of it; integers anywhere, or in the range that is allowed."""
    assert made(StoredTensor("weight", SHAPE), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert made(StoredTensor("weight", SHAPE, (torch.float8_e4m3fn,))).dtype == torch.float8_e4m3fn
    packed = made(StoredTensor("weight_packed", (100, 9), (torch.int32,)))
    assert packed.dtype == torch.int32
    assert int(packed.min()) < -(2**30) < 2**30 < int(packed.max())
    order = made(StoredTensor("weight_g_idx", (500,), (torch.int32,), values=range(4)))
    assert order.unique().tolist() == [0, 1, 2, 3]
    scales = made(StoredTensor("weight_scale", (500,), (torch.uint8,), values=range(255), usual=range(120, 122)))
    assert scales.unique().tolist() == [120, 121]
    state = made(StoredTensor("weight.quant_state", (0,), (torch.uint8,), max_length=9, usual=b'{"a": 1}'))
    assert bytes(state.tolist()) == b'{"a": 1}'
