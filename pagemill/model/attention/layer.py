"""`Attention`: the layer that models use. Owns its view of the KV cache; the backend does the work."""

from collections.abc import Hashable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from pagemill.errors import ModelError, PagemillError
from pagemill.messages.kv_spec import (
    ChunkedLocalSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLASpec,
    SharedKVSpec,
    SlidingWindowSpec,
)
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import AttentionBackend, LatentWeights, StepPlanner
from pagemill.model.forward_context import current_forward, current_gap
from pagemill.model.kernels.kv_target import KVTarget
from pagemill.model.kernels.mirrors import Layer


class Attention(nn.Module):
    """Attention over the paged cache. Its name is the key of its metadata in the forward context.

    With `kv_owner`, the name of another layer, it keeps nothing and reads that layer's keys and values, which must
    run before it. Raises ModelError for a layer that has a window and chunks.
    """

    def __init__(
        self,
        spec: AttentionLayerSpec,
        *,
        name: str,
        backend: type[AttentionBackend],
        kv_owner: str | None = None,
    ) -> None:
        super().__init__()
        if spec.window is not None and spec.chunk_size is not None:
            raise ModelError(
                f"{name} has window={spec.window} and chunk_size={spec.chunk_size}; at most one may be set"
            )
        self.name = name
        self.spec = spec
        self.backend = backend
        self.kv_owner = kv_owner
        self._impl = self.backend.impl(spec)
        self._cache: Tensor | None = None
        self.stored_scales: dict[str, float] = {}
        """k, v: what a checkpoint says that keys and values are divided by in a cache of 8-bit floats; 1 where it says
        nothing."""

    @property
    def cache(self) -> Tensor:
        """The layer's view, of the backend's shape. Raises PagemillError before there is one."""
        if self._cache is None:
            raise PagemillError(f"{self.name} has no KV cache yet")
        return self._cache

    def kv_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """What the layer keeps per token."""
        spec = self.spec
        sizes = (block_size, self.spec.num_kv_heads, self.spec.head_size, dtype)
        kept = FullAttentionSpec(*sizes) if spec.latent_size is None else MLASpec(*sizes)
        if spec.bidirectional:
            kept = EncoderOnlySpec(*sizes)
        elif spec.window is not None:
            kept = SlidingWindowSpec(*sizes, spec.window)
        elif spec.chunk_size is not None:
            kept = ChunkedLocalSpec(*sizes, spec.chunk_size)
        return kept if self.kv_owner is None else SharedKVSpec(block_size, self.kv_owner, kept)

    def bind(self, memory: Tensor, num_blocks: int, spec: KVCacheSpec) -> None:
        """Take the layer's memory, or its owner's: [num_blocks * page_bytes] uint8, block after block."""
        if isinstance(spec, EncoderOnlySpec):
            self._cache = memory
            return
        kept = cast(FullAttentionSpec, spec)
        shape = list(self.backend.cache_shape(num_blocks, kept))
        dim = self.backend.block_dim
        blocks_first = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
        self._cache = memory.view(getattr(torch, kept.dtype)).view(blocks_first).movedim(0, dim)
        tensors = self._impl.tensors
        if self._cache.dtype.is_floating_point and self._cache.element_size() == 1 and tensors.key_scale is None:
            tensors.key_scale, tensors.value_scale = (
                torch.full((1,), self.stored_scales.get(which, 1.0), device=memory.device) for which in "kv"
            )

    def take_sinks(self, sinks: Tensor) -> None:
        """[H], the learnt logit of each head, of a layer whose spec has such."""
        self._impl.tensors.sinks = sinks.float().contiguous()

    def planning(self) -> Hashable:
        """Layers with the same backend and spec are planned alike."""
        return self.backend, self.spec

    def planner(self, device: torch.device) -> StepPlanner:
        """The backend's metadata builder."""
        return self.backend.metadata_builder(self.spec, device)

    def native(self) -> Layer | None:
        """The layer as native code takes it; None where another kind of backend runs."""
        return self._impl.native()

    def write_target(self) -> KVTarget | None:
        """Where this step's keys and values go, when a kernel before attention may write them there; None: `forward`
        wants them."""
        if self.kv_owner is not None or self._cache is None or torch.compiler.is_compiling():
            return None
        return self._impl.write_target(self._cache, current_forward().attention[self.name])

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        written: bool = False,
        asked_only: bool = False,
    ) -> Tensor:
        """query [T, H, D]; key, value [T, Hkv, D], None with a `kv_owner`, or when they are `written` -> [T, H, D].
        `asked_only`: of its rows only those are read that are asked for of the last layer."""
        if (key is None) != (self.kv_owner is not None or written):
            raise PagemillError(f"{self.name} has kv_owner={self.kv_owner}, and key and value are for layers without")
        if torch.compiler.is_compiling():
            # Deferred: registering an operation takes longer than many a module's import, and only compilers ask.
            from pagemill.model.attention.op import attention

            traced: Tensor = attention(query, key, value, self.name)
            return traced
        gap = current_gap()
        attend = self.attend_asked if asked_only else self.attend
        return attend(query, key, value) if gap is None else gap(attend, query, key, value)

    def forward_latents(self, query: Tensor, kept: Tensor, weights: LatentWeights, asked_only: bool = False) -> Tensor:
        """Of a layer that keeps latent vectors: query [T, H, rotary + plain], kept [T, 1, rotary + latent] -> [T, H *
        value]. `asked_only` as in `forward`."""
        if torch.compiler.is_compiling():
            latent = kept[..., -(self.spec.latent_size or 0) :]
            return weights.expand(self.forward(weights.absorb(query), kept, latent).flatten(1))
        gap = current_gap()
        attend = partial(self.attend_latents, weights=weights, asked_only=asked_only)
        return attend(query, kept) if gap is None else gap(attend, query, kept)

    def attend_latents(self, query: Tensor, kept: Tensor, weights: LatentWeights, asked_only: bool = False) -> Tensor:
        """`forward_latents`, with the plan of the current step."""
        metadata = current_forward().attention[self.name]
        if asked_only:
            metadata = self._impl.for_asked_rows(metadata)
        return self._impl.attend_latents(query, kept, self.cache, metadata, weights)

    def store(self, key: Tensor, value: Tensor) -> None:
        """key, value [T, Hkv, D] go to the cache, and nobody attends. Runs outside graphs."""
        self._impl.store(key, value, self.cache, current_forward().attention[self.name])

    def attend(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> Tensor:
        """`forward`, with the plan of the current step, whatever is being captured or compiled."""
        return self._impl.forward(query, key, value, self.cache, current_forward().attention[self.name])

    def attend_asked(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> Tensor:
        """`attend`, where only the rows that are asked for are read."""
        metadata = self._impl.for_asked_rows(current_forward().attention[self.name])
        return self._impl.forward(query, key, value, self.cache, metadata)
