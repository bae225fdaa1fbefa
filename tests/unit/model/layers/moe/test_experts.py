"""Experts compute with all of their weights, or say that some are missing."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.errors import ModelError
from pagemill.model.distributed.group import SoloGroup
from pagemill.model.distributed.parallel_groups import ParallelGroups
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.experts import Experts
from pagemill.model.layers.moe.stacked_experts import StackedExperts
from pagemill.model.quantization.interface import Uniform
from pagemill.model.quantization.unquantized import Unquantized
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint

SIZE, INNER, COUNT = 8, 4, 3
X = torch.ones(2, SIZE)
CHOSEN = torch.tensor([[0], [1]], dtype=torch.int32)
WEIGHTS = torch.ones(2, 1)


def context(rank=0, size=1):
    group = SoloGroup()
    group.rank, group.size = rank, size
    groups = ParallelGroups(SoloGroup(), SoloGroup(), SoloGroup(), group)
    ctx = LayerContext(torch.float32, Uniform(Unquantized()), lambda *_: None, groups, expert_parallel=True)
    return dataclasses.replace(ctx, name="layers.0.mlp.experts")


def put(experts, shard):
    rows, columns = (SIZE, INNER) if shard % 3 == 2 else (INNER, SIZE)
    experts.load("weight", shard, torch.ones(rows, columns))


def test_nothing_is_computed_before_the_last_weight():
    experts = Experts(SIZE, INNER, COUNT, "silu", ctx=context())
    for shard in (0, 2, 3, 4, 5, 6, 7, 8):
        with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts: [1-6] of 6 weights have not been loaded"):
            experts(X, CHOSEN, WEIGHTS)
        assert experts.native(1) is None
        put(experts, shard)
    with pytest.raises(ModelError, match="1 of 6 weights have not been loaded"):
        experts(X, CHOSEN, WEIGHTS)
    put(experts, 1)
    assert (experts(X, CHOSEN, WEIGHTS) > 0).all()


def test_experts_of_one_tensor_need_both():
    experts = StackedExperts(SIZE, INNER, COUNT, "silu", ctx=context(), kinds=("gate_up", "down"))
    experts.load("gate_up", 0, torch.ones(COUNT, 2 * INNER, SIZE))
    with pytest.raises(ModelError, match="3 of 6 weights have not been loaded"):
        experts(X, CHOSEN, WEIGHTS)
    experts.load("down", 0, torch.ones(COUNT, SIZE, INNER))
    assert (experts(X, CHOSEN, WEIGHTS) > 0).all()


def test_a_rank_without_experts_adds_nothing():
    experts = Experts(SIZE, INNER, COUNT, "silu", ctx=context(3, 4))
    assert len(experts.held) == 0
    assert not experts(X, CHOSEN, WEIGHTS).any()


@pytest.mark.parametrize("removed", [".experts.", ".experts.2.down_proj."])
def test_a_checkpoint_without_them_does_not_load(tmp_path, removed):
    folder = make_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if removed not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks tensors of the architecture: model\.layers\.0\.mlp\.experts\."):
        PagedModel.load(folder)
