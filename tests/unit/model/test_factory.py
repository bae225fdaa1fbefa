"""Models whose weights come by uploads that run late: the same as those of plain loading, and errors as clear."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.artifacts.describe import describe
from pagemill.errors import ConfigError, ModelError
from pagemill.model.distributed.group import SoloGroup
from pagemill.model.distributed.parallel_groups import ParallelGroups
from pagemill.model.factory import load_model, save_sharded_state
from pagemill.model.loading import uploads
from pagemill.model.loading.load_weights import Selection
from pagemill.model.loading.sources import safetensors
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.configs import model_config
from tests.fakes.late_copier import LateCopier
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_gguf import convert
from tests.marks import slow


class OneOf(SoloGroup):
    """A group whose other ranks nobody asks for anything."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


class LatePlatform(CpuPlatform):
    def __init__(self):
        super().__init__()
        self.made = LateCopier()

    def copier(self):
        return self.made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(uploads, "PIECE_BYTES", 8192)
    monkeypatch.setattr(uploads, "AHEAD_BYTES", 40_000)
    monkeypatch.setattr(uploads, "SMALL_BYTES", 1000)


def groups_of(rank, size):
    tensor_parallel = OneOf(rank, size)
    return ParallelGroups(tensor_parallel, SoloGroup(), SoloGroup(), tensor_parallel)


def tensors_of(model):
    """Every tensor that the layers hold."""
    found = {}
    for layer in model.modules():
        for name, value in vars(layer).items():
            held = getattr(value, "weight", value)
            if isinstance(held, torch.Tensor):
                found[f"{len(found)}.{name}"] = held
    return found


def check(path, groups=None, **settings):
    """Loads the model both ways; the copier."""
    facts = describe("m", path, load_format=settings.get("load_format", "auto"))
    config = model_config("m", dtype="float32", **settings)
    platform = LatePlatform()
    made = tensors_of(load_model(facts, config, platform, PhaseTimer(), groups))
    wanted = tensors_of(load_model(facts, config, CpuPlatform(), PhaseTimer(), groups))
    assert platform.made.is_over, platform.made.errors
    assert len(made) == len(wanted) > 10
    for name, tensor in wanted.items():
        assert torch.equal(made[name], tensor), name
    return platform.made


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", slow("Qwen2ForCausalLM"), "Qwen3MoeForCausalLM"])
def test_one_rank(tmp_path, architecture):
    folder = make_checkpoint(tmp_path, architecture)
    copier = check(folder)
    held = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert sum(size for _, size in copier.copies) == held  # everything once, and it was guessed


def test_what_is_guessed_is_listed_once(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    monkeypatch.setattr(uploads, "GUESS_BYTES", 30_000)
    opened = []
    read_file = safetensors.read_file
    monkeypatch.setattr(safetensors, "read_file", lambda path, *more: opened.append(path) or read_file(path, *more))
    platform = LatePlatform()
    load_model(describe("m", folder), model_config("m"), platform, PhaseTimer())
    assert len(opened) == 1
    held = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert sum(size for _, size in platform.made.copies) == held


@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_ranks_reads_its_own_part(tmp_path, rank):
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    copier = check(folder, groups_of(rank, 2))
    held = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert sum(size for _, size in copier.copies) < 0.6 * held


def test_a_sharded_state(tmp_path):
    source = make_checkpoint(tmp_path / "source", "LlamaForCausalLM")
    facts = describe("m", source)
    for size in (1, 2):
        folder = tmp_path / f"of-{size}"
        for rank in range(size):
            groups = groups_of(rank, size)
            save_sharded_state(facts, model_config("m", dtype="float32"), CpuPlatform(), groups, folder)
        check(folder, groups_of(0, size), load_format="sharded_state")


def test_without_what_sends_tensors_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "pool_library", lambda: None)
    assert not check(make_checkpoint(tmp_path, "LlamaForCausalLM")).copies


def test_gguf(tmp_path):
    path = convert(make_checkpoint(tmp_path, "LlamaForCausalLM"), tmp_path / "m.gguf", "F16")
    assert check(path).copies


def test_a_file_without_its_end_is_one_clear_error(tmp_path):
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    platform = LatePlatform()
    with pytest.raises(ModelError, match=r"^model\.safetensors cannot be read"):
        load_model(describe("m", folder), model_config("m"), platform, PhaseTimer())
    assert platform.made.is_over


def test_a_file_that_shrinks_while_it_is_read_is_one_clear_error(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    path = folder / "model.safetensors"
    load = Selection.load

    def shrink_and_load(*given):
        os.truncate(path, 5000)
        load(*given)

    monkeypatch.setattr(Selection, "load", shrink_and_load)
    monkeypatch.setattr(uploads, "GUESS_BYTES", 0)
    with pytest.raises(ModelError, match=r"^model\.safetensors ends before the last of its tensors"):
        load_model(describe("m", folder), model_config("m"), LatePlatform(), PhaseTimer())


def test_what_does_not_fit_the_model_is_named(tmp_path):
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.9.mlp.up_proj.weight": torch.ones(900, 9)}, path, {"format": "pt"})
    platform = LatePlatform()
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.9"):
        load_model(describe("m", folder), model_config("m"), platform, PhaseTimer())
    assert platform.made.is_over


def test_a_model_that_cannot_be_built_ends_what_is_on_its_way(tmp_path):
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "none such"}}))
    platform = LatePlatform()
    with pytest.raises((ModelError, ConfigError), match="none such"):
        load_model(describe("m", folder), model_config("m"), platform, PhaseTimer())
    assert platform.made.is_over
