"""Sharded states: saved by one or two ranks, and read back by each; what does not fit is named."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pagemill.artifacts.describe import describe
from pagemill.errors import ConfigError, ModelError
from pagemill.model.distributed.group import SoloGroup
from pagemill.model.distributed.parallel_groups import ParallelGroups, solo_groups
from pagemill.model.factory import build_model, load_model, save_sharded_state
from pagemill.model.loading.load_place import LoadPlace
from pagemill.model.loading.load_weights import Selection
from pagemill.model.loading.shards import METADATA
from pagemill.model.loading.sources import safetensors, sharded_state
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.compressed_checkpoint import Layout, compress
from tests.fakes.configs import model_config
from tests.fakes.stored_formats import fp8, store
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.marks import slow

FIRST_FILE = "model-rank-0-part-0.safetensors"


class OneOf(SoloGroup):
    """A group whose other ranks nobody asks for anything."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


def groups_of(rank, size):
    if size == 1:
        return solo_groups()
    tensor_parallel = OneOf(rank, size)
    return ParallelGroups(tensor_parallel, SoloGroup(), SoloGroup(), tensor_parallel)


def save(model, folder, size=1, **more):
    facts = describe("m", model)
    for rank in range(size):
        save_sharded_state(
            facts, model_config("m", dtype="float32"), CpuPlatform(), groups_of(rank, size), folder, **more
        )
    return folder


def read(folder, rank=0, size=1, options=None):
    """What one rank reads of a state."""
    facts = describe("m", folder, load_format="sharded_state")
    return dict(_read(sharded_state.iterate, facts, rank, size, LoadPlace(rank=rank, world_size=size,
                                                                        options=options or {})))  # fmt: skip


def _read(source, facts, rank, size, place):
    config = model_config("m", dtype="float32", max_model_len=64)
    select = Selection(build_model(facts, config, CpuPlatform(), groups_of(rank, size)))
    for name, tensor in source(facts, torch.float32, 0, select, place):
        yield name, tensor.clone()
    select.check_complete()


@pytest.mark.parametrize("size", [slow(1), 2])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "packed"])
def test_each_rank_reads_what_it_would_of_the_checkpoint(tmp_path, architecture, size):
    model = make_checkpoint(tmp_path / "model", "LlamaForCausalLM" if architecture == "packed" else architecture)
    if architecture == "packed":
        model, _ = compress(model, tmp_path / "compressed", Layout())
    state = save(model, tmp_path / "state", size, max_bytes=40_000)
    assert (state / "model-rank-0-part-1.safetensors").exists(), "several files of a rank"
    for rank in range(size):
        expected = dict(_read(safetensors.iterate, describe("m", model), rank, size, LoadPlace()))
        found = read(state, rank, size)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("size", [1, 2])
def test_layers_that_a_quantized_checkpoint_has_as_floats(tmp_path, size):
    """Of 8-bit floats, a layer's type alone tells, which only the rank sees that reads it."""
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    model, plain = store(
        folder, tmp_path, {"quant_method": "fp8"}, lambda weight: fp8(weight, None, "weight_scale"), only=r"self_attn"
    )
    state = save(model, tmp_path / "state", size)
    found = [read(state, rank, size) for rank in range(size)]
    assert found[0]["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    halves = torch.cat([tensors["model.layers.0.mlp.up_proj.weight"] for tensors in found])
    assert torch.equal(halves, load_file(plain / "model.safetensors")["model.layers.0.mlp.up_proj.weight"])
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight_scale"], tensors["model.layers.0.self_attn.q_proj.input_scale"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks tensors .*q_proj\.weight_scale"):
        save(model, tmp_path / "other", size)


def test_a_state_loads_as_a_model(tmp_path):
    state = save(make_checkpoint(tmp_path, "LlamaForCausalLM"), tmp_path / "state")
    facts = describe("m", state, load_format="sharded_state")
    config = model_config("m", dtype="float32", load_format="sharded_state")
    assert load_model(facts, config, CpuPlatform(), PhaseTimer()).cache_layers()
    assert (state / "tokenizer.json").exists()
    with pytest.raises(ModelError, match="use --load-format sharded_state"):
        describe("m", state)


def test_a_pattern_of_names(tmp_path):
    state = save(make_checkpoint(tmp_path, "LlamaForCausalLM"), tmp_path / "s", pattern="r{rank}.{part}.safetensors")
    assert (state / "r0.0.safetensors").exists()
    assert read(state, options={"pattern": "r{rank}.{part}.safetensors"})
    for options, message in [
        ({"pattern": "../{rank}{part}.safetensors"}, "pattern='../"),
        ({"pattern": "{rank}.safetensors"}, "is not allowed"),
        ({"threads": 2}, "'threads', no option of sharded_state; known: pattern"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read(state, options=options)


def test_other_ranks_than_saved_it(tmp_path):
    state = save(make_checkpoint(tmp_path, "LlamaForCausalLM"), tmp_path / "state", 2)
    with pytest.raises(ModelError, match="was saved by 2 ranks, and this is one of 1"):
        read(state)
    with pytest.raises(ModelError, match=r"has no model-rank-3-part-0\.safetensors"):
        read(state, 3, 4)


def _without_metadata(tensors, metadata):
    return tensors, None


def _no_json(tensors, metadata):
    return tensors, {METADATA: "{" * 100}


def _another_version(tensors, metadata):
    return tensors, {METADATA: json.dumps(json.loads(metadata[METADATA]) | {"version": 9})}


def _huge_sizes(tensors, metadata):
    header = json.loads(metadata[METADATA])
    header["tensors"] = [[name, [-1, 10**30], part] for name, _, part in header["tensors"]]
    return tensors, {METADATA: json.dumps(header)}


def _no_such_dimension(tensors, metadata):
    header = json.loads(metadata[METADATA])
    header["tensors"] = [[name, shape, part and [9, *part[1:]]] for name, shape, part in header["tensors"]]
    return tensors, {METADATA: json.dumps(header)}


def _misshapen(tensors, metadata):
    name = "model.norm.weight"
    return tensors | {name: tensors[name][:3].contiguous()}, metadata


def _extra(tensors, metadata):
    return tensors | {"a": torch.zeros(1)}, metadata


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_metadata, "is no sharded state that pagemill has saved"),
        (_no_json, "is damaged"),
        (_another_version, "version 9, and this is 1"),
        (_huge_sizes, "is damaged: pagemill_sharded_state in its metadata: not a size"),
        (_no_such_dimension, "is damaged: pagemill_sharded_state in its metadata: a part outside its tensor"),
        (_misshapen, r"tensor model\.norm\.weight has shape \(3,\)"),
        (_extra, "its metadata and its tensors differ in tensor a"),
    ],
)
def test_a_spoilt_file_is_one_line(tmp_path, spoil, message):
    state = save(make_checkpoint(tmp_path, "LlamaForCausalLM"), tmp_path / "state")
    path = state / FIRST_FILE
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors, changed = spoil(load_file(path), metadata)
    save_file(tensors, path, metadata=changed)
    with pytest.raises(ModelError, match=message) as raised:
        read(state)
    assert "\n" not in str(raised.value)


def test_what_is_cut_off_is_one_line(tmp_path):
    state = save(make_checkpoint(tmp_path, "LlamaForCausalLM"), tmp_path / "state")
    path = state / FIRST_FILE
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be read"):
        read(state)


def test_what_cannot_be_saved(tmp_path):
    model = make_checkpoint(tmp_path, "LlamaForCausalLM")
    save(model, tmp_path / "state")
    with pytest.raises(ConfigError, match="is there already; name an empty folder"):
        save(model, tmp_path / "state")
    with pytest.raises(ConfigError, match="is the folder of the model itself"):
        save(model, model)
    with pytest.raises(ConfigError, match="cannot be written"):
        save(model, model / "config.json" / "state")
    facts = dataclasses.replace(describe("m", model), path=str(model / "config.json"))
    with pytest.raises(ConfigError, match="GGUF"):
        save_sharded_state(facts, model_config("m"), CpuPlatform(), solo_groups(), tmp_path / "other")
