"""Two backends for one layer: one for steps in which every request has one token, one for all others."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    CascadePlanner,
    CommonAttentionMetadata,
    LatentWeights,
    MetadataBuilder,
    ReplayPlanner,
    StepOnHost,
)
from pagemill.model.kernels.kv_target import KVTarget

_SAMPLE = FullAttentionSpec(16, 3, 8, "bfloat16")


@dataclass(frozen=True, slots=True)
class PhasedMetadata:
    """The plan of one of the two."""

    decodes: bool
    plan: Any


@cache
def phased(prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend made of two. Raises ConfigError when they keep the cache in different shapes."""
    shapes = [(backend.cache_shape(5, _SAMPLE), backend.block_dim) for backend in (prefill, decode)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"attention_config.prefill_backend={prefill.name} and decode_backend={decode.name} keep the KV cache in "
            "different shapes; choose two that keep it alike, such as FLASH_ATTN and TRITON_ATTN"
        )

    class Builder(_PhasedBuilder):
        parts = (prefill, decode)
        graph_support = _support(prefill.metadata_builder.graph_support, decode.metadata_builder.graph_support)
        most_replayed = prefill.metadata_builder.most_replayed

    class Impl(_PhasedImpl):
        parts = (prefill, decode)

    class Backend(AttentionBackend):
        name = f"{prefill.name}+{decode.name}"
        capability = prefill.capability
        metadata_builder = Builder
        impl = Impl
        block_dim = prefill.block_dim
        cache_shape = staticmethod(prefill.cache_shape)

    return Backend


def _support(prefill: AttentionCGSupport, decode: AttentionCGSupport) -> AttentionCGSupport:
    """That of prefill is that of mixed batches; decode batches need only the other's."""
    return max(min(prefill, decode), min(decode, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE))


class _PhasedBuilder(MetadataBuilder):
    """Plans with the one that will run."""

    parts: tuple[type[AttentionBackend], type[AttentionBackend]]

    def __init__(self, spec: AttentionLayerSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._prefill, self._decode = (part.metadata_builder(spec, device) for part in self.parts)

    def build(self, common: CommonAttentionMetadata) -> PhasedMetadata:
        decodes = common.max_query_len <= 1
        return PhasedMetadata(decodes, (self._decode if decodes else self._prefill).build(common))

    def cascades(self, prefix_len: int, num_requests: int) -> bool:
        """As `CascadePlanner` says, of the one that would run."""
        return isinstance(self._decode, CascadePlanner) and self._decode.cascades(prefix_len, num_requests)

    def before_replay(self, step: StepOnHost) -> None:
        """As `ReplayPlanner` says, if the one that will run is one."""
        if isinstance(self._decode, ReplayPlanner):
            self._decode.before_replay(step)


class _PhasedImpl(AttentionImpl):
    """Runs the one whose plan it gets."""

    parts: tuple[type[AttentionBackend], type[AttentionBackend]]

    def __init__(self, spec: AttentionLayerSpec) -> None:
        super().__init__(spec)
        self._prefill, self._decode = (part.impl(spec) for part in self.parts)
        self._prefill.tensors = self._decode.tensors = self.tensors

    def write_target(self, kv_cache: Tensor, metadata: PhasedMetadata) -> KVTarget | None:
        return self._of(metadata).write_target(kv_cache, metadata.plan)

    def for_asked_rows(self, metadata: PhasedMetadata) -> PhasedMetadata:
        return PhasedMetadata(metadata.decodes, self._of(metadata).for_asked_rows(metadata.plan))

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: PhasedMetadata
    ) -> Tensor:
        return self._of(metadata).forward(query, key, value, kv_cache, metadata.plan)

    def attend_latents(
        self, query: Tensor, kept: Tensor, kv_cache: Tensor, metadata: PhasedMetadata, weights: LatentWeights
    ) -> Tensor:
        return self._of(metadata).attend_latents(query, kept, kv_cache, metadata.plan, weights)

    def _of(self, metadata: PhasedMetadata) -> AttentionImpl:
        return self._decode if metadata.decodes else self._prefill
