"""Attention on a CPU that can be part of any graph: each token is computed as if it decoded. Reads no length on the
host."""

from typing import Any, ClassVar

import torch

from pagemill.model.attention.backends.torch_paged import DecodeMetadata, TorchPagedBackend, TorchPagedBuilder
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import CommonAttentionMetadata


class EveryTokenBuilder(TorchPagedBuilder):
    """Finds each token's request; tokens of the padding see nothing."""

    graph_support = AttentionCGSupport.ALWAYS

    def build(self, common: CommonAttentionMetadata) -> Any:
        tokens, ends = torch.arange(len(common.slot_mapping)), common.query_start[1:]
        requests = torch.searchsorted(ends, tokens, right=True)
        padding = requests >= common.num_requests
        requests = requests.clamp(max=common.num_requests - 1)
        seen = common.seq_lens[requests] - (ends[requests] - 1 - tokens)
        return DecodeMetadata(common.slot_mapping, common.block_table[requests], seen.masked_fill(padding, 0))


class CapturableBackend(TorchPagedBackend):
    """TORCH_PAGED, but always to be captured."""

    name = "TEST_CAPTURABLE"
    metadata_builder = EveryTokenBuilder


class CascadingBuilder(EveryTokenBuilder):
    """Would make use of 32 tokens that two requests share; notes what it is told."""

    prefixes: ClassVar[list[int]] = []
    checks: ClassVar[bool] = True

    def cascades(self, prefix_len: int, num_requests: int) -> bool:
        return prefix_len >= 32 and num_requests >= 2

    def build(self, common: CommonAttentionMetadata) -> Any:
        prefix = common.common_prefix_len
        self.prefixes.append(prefix)
        blocks = common.block_table[:, : prefix // common.block_size]
        if prefix and self.checks:
            assert bool((blocks == blocks[0]).all()) and bool((common.seq_lens > prefix).all())
        return super().build(common)


class CascadingBackend(CapturableBackend):
    name = "TEST_CASCADING"
    metadata_builder = CascadingBuilder
