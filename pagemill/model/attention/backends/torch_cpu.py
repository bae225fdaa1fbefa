"""TORCH_CPU: paged attention in plain torch, for every head size, GQA, window, chunk, soft cap, sinks and ALiBi. The
reference.

Requests that decode one token run together, padded and masked; longer queries run one request at a time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.capability import INT8_KV, SAME_KV, Capability
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    CommonAttentionMetadata,
    MetadataBuilder,
)
from pagemill.model.kernels.reference import dequantized_rows, quantized_rows
from pagemill.utils.math import ceil_div


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests of one step whose queries are equally long, with the keys that they may see (S of them, padded)."""

    tokens: Tensor
    """[R * Q] rows of the batch."""
    num_requests: int
    query_len: int
    blocks: Tensor
    """[R * B] block ids, row after row; S = B * block_size."""
    hidden: Tensor
    """[R, 1, Q, S] bool: what a query must not see."""
    stale: Tensor
    """[R, 1, S, 1] bool: what no query sees. Its values are zeroed, since 0 * NaN of a recycled block is NaN."""
    distance: Tensor
    """[R, Q, S] position of the key less that of the query."""


@dataclass(frozen=True, slots=True)
class TorchCpuMetadata:
    """The plan of one step."""

    slot_mapping: Tensor
    rows: tuple[Rows, ...]


class TorchCpuBuilder(MetadataBuilder):
    """Gathers decoding requests into one group of rows; every other request is a group of its own."""

    def build(self, common: CommonAttentionMetadata) -> TorchCpuMetadata:
        query_lens = common.query_start[1:] - common.query_start[:-1]
        decoding = (query_lens == 1).nonzero().squeeze(1)
        groups = [decoding] if len(decoding) else []
        groups += [row.unsqueeze(0) for row in (query_lens != 1).nonzero().squeeze(1)]
        return TorchCpuMetadata(common.slot_mapping, tuple(self._rows(common, group) for group in groups))

    def _rows(self, common: CommonAttentionMetadata, requests: Tensor) -> Rows:
        starts = common.query_start[requests].long()
        query_len = int(common.query_start[requests[0] + 1] - starts[0])
        seq_lens = common.seq_lens[requests].long()
        first, last = self._block_range(seq_lens, query_len, common.block_size)
        blocks = common.block_table[requests, first:last].long()
        keys = torch.arange(first * common.block_size, last * common.block_size)
        queries = (seq_lens - query_len).unsqueeze(1) + torch.arange(query_len)
        hidden = keys > queries.unsqueeze(2)
        if self.spec.window is not None:
            hidden |= keys <= queries.unsqueeze(2) - self.spec.window
        if self.spec.chunk_size is not None:
            hidden |= keys < (queries // self.spec.chunk_size * self.spec.chunk_size).unsqueeze(2)
        tokens = (starts.unsqueeze(1) + torch.arange(query_len)).reshape(-1)
        stale = hidden.all(1)[:, None, :, None]
        distance = keys - queries.unsqueeze(2)
        return Rows(tokens, len(requests), query_len, blocks.reshape(-1), hidden.unsqueeze(1), stale, distance)

    def _block_range(self, seq_lens: Tensor, query_len: int, block_size: int) -> tuple[int, int]:
        """Blocks that any of the requests may look at: [first, last)."""
        last = ceil_div(int(seq_lens.max()), block_size)
        return self.spec.first_seen(int(seq_lens.min()) - query_len) // block_size, last


class TorchCpuImpl(AttentionImpl):
    """Writes keys and values to the cache, gathers the blocks of each group of rows, and attends."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: TorchCpuMetadata
    ) -> Tensor:
        if key is not None and value is not None:
            self._write(key, value, kv_cache, metadata.slot_mapping)
        output = torch.empty_like(query)
        for rows in metadata.rows:
            output[rows.tokens] = self._attend(query[rows.tokens], kv_cache, rows)
        return output

    def store(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        self._write(key, value, kv_cache, metadata.slot_mapping)

    def _write(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        block_size = kv_cache.shape[3]
        blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
        if kv_cache.dtype == torch.int8:
            key, value = quantized_rows(key), quantized_rows(value)
        kv_cache[0][blocks, :, offsets] = key
        kv_cache[1][blocks, :, offsets] = value

    def _attend(self, query: Tensor, kv_cache: Tensor, rows: Rows) -> Tensor:
        """[R * Q, H, D] -> [R * Q, H, D]; the query heads of one key head are folded into the query length."""
        spec, (num_requests, query_len) = self.spec, (rows.num_requests, rows.query_len)
        group = spec.num_heads // spec.num_kv_heads
        keys, values = (_gather(half, rows.blocks, num_requests) for half in kv_cache)
        if kv_cache.dtype == torch.int8:
            keys, values = dequantized_rows(keys), dequantized_rows(values)
        folded = query.view(num_requests, query_len, spec.num_kv_heads, group, spec.head_size)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(num_requests, spec.num_kv_heads, -1, spec.head_size)
        scores = torch.matmul(folded.to(keys.dtype), keys.transpose(2, 3)).float().mul_(spec.scale)
        if spec.soft_cap is not None:
            scores = torch.tanh(scores.div_(spec.soft_cap)).mul_(spec.soft_cap)
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes, device=scores.device).view(spec.num_kv_heads, group, 1, 1)
            scores += (slopes * rows.distance[:, None, None]).flatten(2, 3)
        scores.masked_fill_(rows.hidden.repeat(1, 1, group, 1), -torch.inf)
        values = values.masked_fill(rows.stale, 0)
        attended = torch.matmul(self._shares(scores, query_len).to(values.dtype), values).to(query.dtype)
        attended = attended.view(num_requests, spec.num_kv_heads, group, query_len, spec.head_size)
        return attended.permute(0, 3, 1, 2, 4).reshape(-1, spec.num_heads, spec.head_size)

    def _shares(self, scores: Tensor, query_len: int) -> Tensor:
        """The softmax over keys, [R, Hkv, group * Q, S], of which a head's sink takes its share."""
        sinks = self.tensors.sinks
        if sinks is None:
            return scores.softmax(-1)
        of_rows = sinks.float().view(1, self.spec.num_kv_heads, -1, 1).repeat_interleave(query_len, dim=2)
        return torch.cat([scores, of_rows.expand(len(scores), -1, -1, -1)], dim=-1).softmax(-1)[..., :-1]


def _gather(cache: Tensor, blocks: Tensor, num_requests: int) -> Tensor:
    """[num_blocks, Hkv, block_size, D] and [R * B] -> [R, Hkv, S, D]."""
    _, num_kv_heads, block_size, head_size = cache.shape
    picked = cache.index_select(0, blocks).view(num_requests, -1, num_kv_heads, block_size, head_size)
    return picked.transpose(1, 2).reshape(num_requests, num_kv_heads, -1, head_size)


class TorchCpuBackend(AttentionBackend):
    """Plain torch on a CPU."""

    name = "TORCH_CPU"
    capability = Capability(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        kv_dtypes=SAME_KV | INT8_KV,
        sliding_window=True,
        chunked_local=True,
        soft_cap=True,
        sinks=True,
        alibi=True,
    )
    metadata_builder = TorchCpuBuilder
    impl = TorchCpuImpl

    @staticmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """[2, num_blocks, Hkv, block_size, D]: keys, then values; a head's part of a block is contiguous. Of
        int8, D + 4: the bytes of a row's scale are behind its elements."""
        return (2, num_blocks, spec.num_kv_heads, spec.block_size, spec.row_elements())
