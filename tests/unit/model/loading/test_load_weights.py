"""Every tensor arrives once, in its place; missing, unexpected and misshapen ones are named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.errors import ModelError
from pagemill.model.loading.weight_map import Target, WeightMap
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint

MAP = WeightMap(stack={"qkv_proj": ("q_proj", "k_proj", "v_proj")}, strip_prefix="model.", ignore=("inv_freq",))


def test_the_weight_map_stacks_strips_and_ignores():
    target = MAP.target("model.layers.0.self_attn.k_proj.bias")
    assert target == Target("layers.0.self_attn.qkv_proj", "bias", 1)
    assert MAP.source_name(target) == "model.layers.0.self_attn.k_proj.bias"
    assert MAP.target("lm_head.weight") == Target("lm_head", "weight", 0)
    assert MAP.target("model.layers.0.rotary_emb.inv_freq") is None
    target = MAP.target("model.layers.0.mlp.down_proj.weight.absmax")
    assert target == Target("layers.0.mlp.down_proj", "weight.absmax", 0)
    assert MAP.source_name(target) == "model.layers.0.mlp.down_proj.weight.absmax"


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path, "Qwen2ForCausalLM")


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_missing_tensors_are_named(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(ModelError, match=r"lacks tensors .*model\.layers\.1\.self_attn\.k_proj\.bias"):
        PagedModel.load(folder)


def test_unexpected_tensors_are_named(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(1)}))
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.9"):
        PagedModel.load(folder)


def test_misshapen_tensors_are_named_with_both_shapes(folder):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\(3,\).*64"):
        PagedModel.load(folder)


def test_a_truncated_file_is_one_clear_error(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        PagedModel.load(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        PagedModel.load(folder)
