"""TRITON_MLA: attention over latent vectors by Triton kernels, for decode and prefill in one batch, safe to capture.

All heads of a token read one entry of the cache per token (DeepSeek-V2, 2024, in the absorbed form). That is the least
that decoding can read. Prompts of more than a few tokens have keys and values of their own for each head
(latent_prompts.py), where the host knows the lengths: not in captured graphs, nor in compiled models.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.backends import latent_prompts
from pagemill.model.attention.backends.latent_prompts import WORKSPACE_BYTES, LatentPrompts, Workspace, wanted
from pagemill.model.attention.capability import AttentionLayerSpec, Capability
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    CommonAttentionMetadata,
    LatentWeights,
    MetadataBuilder,
)

NUM_PROGRAMS = 264
"""As many as keep a large GPU busy: two on each multiprocessor."""
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class MlaMetadata:
    """The plan of one step."""

    common: CommonAttentionMetadata
    requests: Tensor
    """[T] int32, of each token."""
    num_seen: Tensor
    """[T] int32: tokens that each token sees; 0 in the padding."""
    num_splits: int
    prompts: LatentPrompts | None = None
    """Requests that are attended to otherwise; the fields above then are of the other tokens."""
    workspace: Workspace | None = None
    ends_only: bool = False
    """Whether of the tiles of such requests only those with their last tokens are read."""
    absorbed: "MlaMetadata | None" = None
    """Where there are such requests: the plan without them, of all tokens."""


class MlaBuilder(MetadataBuilder):
    """Finds each token's request, on the device."""

    graph_support = AttentionCGSupport.ALWAYS
    most_replayed = 128

    def __init__(self, spec: AttentionLayerSpec, device: torch.device, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        super().__init__(spec, device)
        self._workspace = None if spec.expanded_sizes is None else Workspace(device, workspace_bytes)

    def build(self, common: CommonAttentionMetadata) -> MlaMetadata:
        plan = self._absorbed(common)
        lens = common.batch_lens
        sizes = self.spec.expanded_sizes
        if lens is None or self._workspace is None or sizes is None or common.max_query_len == 1:
            return plan
        chosen = wanted(lens, sizes[1], self._workspace.num_bytes)
        if not chosen.any():
            return plan
        prompts = LatentPrompts(lens, chosen, self.device, self._workspace.num_bytes)
        requests, num_seen = plan.requests, plan.num_seen
        if prompts.others is not None:
            requests, num_seen = requests.index_select(0, prompts.others), num_seen.index_select(0, prompts.others)
        splits = self._num_splits(len(requests))
        return MlaMetadata(common, requests, num_seen, splits, prompts, self._workspace, absorbed=plan)

    def _num_splits(self, num_tokens: int) -> int:
        programs = num_tokens * -(-self.spec.num_heads // 64)
        return min(MAX_SPLITS, max(1, NUM_PROGRAMS // max(1, programs)))

    def _absorbed(self, common: CommonAttentionMetadata) -> MlaMetadata:
        num_tokens = common.num_tokens
        ends = common.query_start[1:]
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=self.device)
        num_splits = self._num_splits(num_tokens)
        if common.max_query_len == 1 and num_tokens == common.num_requests:
            return MlaMetadata(common, tokens, common.seq_lens, num_splits)
        found = torch.searchsorted(ends, tokens, right=True, out_int32=True)
        requests = found.clamp(max=common.num_requests - 1)
        seen = common.seq_lens[requests.long()] - (ends[requests.long()] - 1 - tokens)
        seen = seen.masked_fill(found >= common.num_requests, 0).clamp(min=0).to(torch.int32)
        return MlaMetadata(common, requests, seen, num_splits)


class MlaImpl(AttentionImpl):
    """Writes the latent vectors, attends to them, merges the splits."""

    def for_asked_rows(self, metadata: MlaMetadata) -> MlaMetadata:
        return replace(metadata, ends_only=metadata.common.asks_for_ends)

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: MlaMetadata
    ) -> Tensor:
        from pagemill.model.kernels.triton.mla import attend_latents, write_latents  # deferred: triton

        metadata = metadata.absorbed or metadata
        common = metadata.common
        spec = self.spec
        if key is not None:
            write_latents(key.squeeze(1), kv_cache, common.slot_mapping)
        return attend_latents(
            query.contiguous(),
            kv_cache,
            common.block_table,
            metadata.requests,
            metadata.num_seen,
            spec.scale,
            spec.latent_size or spec.head_size,
            metadata.num_splits,
        )

    def attend_latents(
        self, query: Tensor, kept: Tensor, kv_cache: Tensor, metadata: MlaMetadata, weights: LatentWeights
    ) -> Tensor:
        prompts = metadata.prompts
        if prompts is None or metadata.workspace is None:
            return super().attend_latents(query, kept, kv_cache, metadata, weights)
        from pagemill.model.kernels.triton.mla import attend_latents, write_latents  # deferred: triton

        common = metadata.common
        spec = self.spec
        write_latents(kept.squeeze(1), kv_cache, common.slot_mapping)
        output = torch.empty(*query.shape[:2], weights.sizes[1], dtype=query.dtype, device=query.device)
        output[prompts.num_tokens :].zero_()
        if prompts.others is not None:
            latent = attend_latents(
                weights.absorb(query.index_select(0, prompts.others)), kv_cache, common.block_table, metadata.requests,
                metadata.num_seen, spec.scale, spec.latent_size or spec.head_size, metadata.num_splits,
            )  # fmt: skip
            found = weights.expand(latent.flatten(1)).view(len(latent), *output.shape[1:])
            output.index_copy_(0, prompts.others, found)
        latent_prompts.attend(
            output, query, kv_cache, common.block_table, spec.scale, weights, prompts, metadata.workspace,
            metadata.ends_only,
        )  # fmt: skip
        return output.flatten(1)


class TritonMlaBackend(AttentionBackend):
    """Triton kernels over latent vectors on a GPU."""

    name = "TRITON_MLA"
    capability = Capability(devices=frozenset({"cuda"}), dtypes=frozenset({"float32", "bfloat16", "float16"}), mla=True)
    metadata_builder = MlaBuilder
    impl = MlaImpl
    block_dim = 0
    package = "triton"

    @staticmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """[num_blocks, block_size, D]: of each token, the rotary part of its key, then the latent vector."""
        return (num_blocks, spec.block_size, spec.head_size)
