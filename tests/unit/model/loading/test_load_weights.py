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


@pytest.mark.parametrize("number", ["9", "9" * 5000])
def test_unexpected_tensors_are_named(folder, number):
    """Also by numbers that Python refuses to read."""
    change(folder, lambda tensors: tensors.update({f"model.layers.{number}.mlp.up_proj.weight": torch.ones(1)}))
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.9"):
        PagedModel.load(folder)


def check_one_short_line(folder):
    with pytest.raises(ModelError) as caught:
        PagedModel.load(folder)
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name", ["model.layers.0.{}.weight", "model.layers.0.self_attn.{}.k_scale", "{}", "\n{}\x1b[2J"]
)
def test_names_of_megabytes_and_with_ends_of_lines_are_one_short_line(folder, name):
    change(
        folder, lambda tensors: tensors.update({name.format(f"{'x' * 1_000_000}{n}"): torch.ones(2) for n in range(9)})
    )
    check_one_short_line(folder)


def test_shapes_of_a_million_dimensions_are_one_short_line(folder):
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["shape"] += [1] * 1_000_000
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    check_one_short_line(folder)


def test_an_expert_of_an_impossible_number_is_named(tmp_path):
    folder = make_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    name = f"model.layers.0.mlp.experts.{'9' * 5000}.up_proj.weight"
    change(folder, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.0\.mlp\.experts\.9"):
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


def test_a_tensor_of_two_files_is_named(folder):
    """Whichever of them is right."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {"model-1.safetensors": names, "model-2.safetensors": [names[0]]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, held in files.items() for name in held} | {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"has tensor {names[0]} twice, in two files or under two names"):
        PagedModel.load(folder)


PLACES = [
    "self_attn.{0}_proj.{0}_scale",
    "self_attn.{0}_scale",
    "self_attn.attn.{0}_scale",
    "self_attn.{0}_proj.output_scale",
]
"""Where ModelOpt, compressed-tensors, vLLM and older files of compressed-tensors have them."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_of_a_cache_of_8_bit_floats_are_kept_for_it(folder, caplog, place, shape):
    def add(tensors):
        for layer in range(4):
            for which, scale in (("k", 0.25), ("v", 2.0)):
                tensors[f"model.layers.{layer}.{place.format(which)}"] = torch.full(shape, scale + layer)

    before = PagedModel.load(folder)
    change(folder, add)
    caplog.set_level("INFO")
    model = PagedModel.load(folder).model
    assert "8 scales of keys and values: they are used with --kv-cache-dtype fp8 only" in caplog.text
    assert before.model.layers["0"].self_attn.attn.stored_scales == {}
    scales = [model.layers[str(layer)].self_attn.attn.stored_scales for layer in range(4)]
    assert scales == [{"k": 0.25 + layer, "v": 2.0 + layer} for layer in range(4)]


def test_one_scale_of_keys_and_values_and_what_is_no_scale_of_a_cache(folder):
    def add(tensors):
        for which, value in (("kv", 0.5), ("q", 3.0), ("prob", 4.0)):
            tensors[f"model.layers.1.self_attn.{which}_scale"] = torch.tensor(value)

    change(folder, add)
    model = PagedModel.load(folder).model
    assert model.layers["1"].self_attn.attn.stored_scales == {"k": 0.5, "v": 0.5}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.0.self_attn.k_proj.k_scale", torch.ones(2), r"k_scale has shape \(2,\): one scale"),
        ("model.layers.0.self_attn.v_scale", torch.tensor(0.0), "v_scale is 0.0: a scale is a finite number above 0"),
        ("model.layers.0.self_attn.v_scale", torch.tensor(float("nan")), "v_scale is nan"),
        ("model.layers.9.self_attn.v_scale", torch.tensor(1.0), "a scale of the KV cache for layers.9.self_attn"),
    ],
)
def test_scales_that_cannot_be_are_named(folder, name, value, words):
    change(folder, lambda tensors: tensors.update({name: value}))
    with pytest.raises(ModelError, match=words):
        PagedModel.load(folder)
