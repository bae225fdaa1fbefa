"""`LayerContext`: what a layer is told about its surroundings - type, place, ranks, and who chooses its parts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import AttentionBackend
from pagemill.model.distributed.parallel_groups import ParallelGroups, solo_groups
from pagemill.model.layers.moe.exchange import Exchange
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.quantization.interface import Quantization, QuantMethod, Role

AttentionChooser = Callable[[AttentionLayerSpec, str], type[AttentionBackend]]
"""(what the layer computes, its name) -> the backend."""


@dataclass(frozen=True)
class LayerContext:
    """Handed down through the constructors of a model."""

    dtype: torch.dtype
    quantization: Quantization
    attention: AttentionChooser
    groups: ParallelGroups = field(default_factory=solo_groups)
    """The ranks that compute the model together; a layer splits its weights over groups.tp."""
    expert_parallel: bool = False
    """Whether whole experts are dealt out over groups.ep, instead of a slice of each over groups.tp."""
    exchange: Exchange | None = None
    """Carries tokens between replicas, where experts are dealt out over several."""
    embeds_at_end: bool = False
    """Whether the last pipeline stage has the embeddings of tokens too, for heads that read them there."""
    names: WeightMap = field(default_factory=WeightMap)
    """What a checkpoint calls the layers."""
    name: str = ""

    def child(self, name: str) -> "LayerContext":
        """The same surroundings, one name deeper."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def method(self, shard: int, role: Role) -> QuantMethod:
        """How the checkpoint stores the weight of one of the layers that this one is stacked from."""
        return self.quantization.method(self.names.source_module(self.name, shard), role)
