"""TORCH_MLA: attention over latent vectors in plain torch, on any device. The reference, not meant to be fast.

A token's entry of the cache is read by all heads: as its key, and, its last `latent_size` elements, as its value
(DeepSeek-V2, 2024, in the absorbed form).
"""

from typing import Any

import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.backends.torch_cpu import Rows
from pagemill.model.attention.backends.torch_paged import TorchPagedBuilder
from pagemill.model.attention.capability import Capability
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import AttentionBackend, AttentionImpl


class TorchMlaBuilder(TorchPagedBuilder):
    """Rows of requests, planned on the host: never part of a graph."""

    graph_support = AttentionCGSupport.NEVER
    hands_on_decodes = False


class TorchMlaImpl(AttentionImpl):
    """Writes the latent vectors, gathers the blocks of each group of rows, and attends."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: Any
    ) -> Tensor:
        if key is not None:
            entries = kv_cache.view(-1, kv_cache.shape[2])
            slots = metadata.slot_mapping
            # Padding goes to the null block.
            entries[slots.clamp(min=0)] = key.squeeze(1).masked_fill((slots < 0).unsqueeze(1), 0)
        latent_size = self.spec.latent_size or self.spec.head_size
        output = query.new_zeros(*query.shape[:2], latent_size)
        for rows in metadata.rows:
            output[rows.tokens] = self._attend(query[rows.tokens], kv_cache, rows, latent_size)
        return output

    def _attend(self, query: Tensor, kv_cache: Tensor, rows: Rows, latent_size: int) -> Tensor:
        """[R * Q, H, D] -> [R * Q, H, latent]."""
        num_requests, query_len, (_, num_heads, size) = rows.num_requests, rows.query_len, query.shape
        entries = kv_cache.index_select(0, rows.blocks).view(num_requests, -1, size)
        entries = entries.masked_fill(rows.stale[:, 0], 0)
        queries = query.view(num_requests, query_len * num_heads, size)
        scores = torch.matmul(queries, entries.transpose(1, 2)).float().mul_(self.spec.scale)
        hidden = rows.hidden[:, 0].repeat_interleave(num_heads, dim=1)
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1).to(query.dtype)
        attended = torch.matmul(weights, entries[..., -latent_size:])
        return attended.view(-1, num_heads, latent_size)


class TorchMlaBackend(AttentionBackend):
    """Plain torch over latent vectors."""

    name = "TORCH_MLA"
    capability = Capability(
        devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({"float32", "bfloat16", "float16"}), mla=True
    )
    metadata_builder = TorchMlaBuilder
    impl = TorchMlaImpl
    block_dim = 0

    @staticmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """[num_blocks, block_size, D]."""
        return (num_blocks, spec.block_size, spec.head_size)
