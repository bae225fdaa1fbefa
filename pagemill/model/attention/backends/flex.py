"""FLEX_ATTENTION: torch's flex_attention over gathered keys. For layers that no other backend of a GPU takes.

Requests are padded to the longest of the step; lengths are read on the device, sizes are the host's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from pagemill.model.attention.backends.triton_attn import TritonBackend
from pagemill.model.attention.capability import Capability
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    CommonAttentionMetadata,
    MetadataBuilder,
)
from pagemill.utils.math import ceil_div


@dataclass(frozen=True, slots=True)
class FlexMetadata:
    """The plan of one step; Q queries and S keys per request, padded."""

    slot_mapping: Tensor
    tokens: Tensor
    """[R, Q] rows of the batch; padding repeats a request's last."""
    real: Tensor
    """[T'] places in [R * Q] that are no padding, in the order of the batch."""
    blocks: Tensor
    """[R, S / block_size] block ids."""
    context: Tensor
    """[R] tokens before the step."""
    hidden: Tensor
    """[R, S] bool: keys that no query sees. They may be NaN, and 0 * NaN is NaN."""
    mask: BlockMask


class FlexBuilder(MetadataBuilder):
    """Makes the mask once for all layers."""

    def build(self, common: CommonAttentionMetadata) -> FlexMetadata:
        start = common.query_start.long()
        seq_lens = common.seq_lens.long()
        lengths = start[1:] - start[:-1]
        columns = torch.arange(common.max_query_len, device=self.device)
        tokens = start[:-1, None] + torch.minimum(columns, (lengths - 1).clamp(min=0)[:, None])
        batch = torch.arange(common.num_tokens, device=self.device)
        request = torch.searchsorted(start[1:].contiguous(), batch, right=True)
        real = request * common.max_query_len + batch - start[request]
        num_blocks = ceil_div(common.max_seq_len, common.block_size)
        context = seq_lens - lengths
        mask = self._mask(context, seq_lens, common.max_query_len, num_blocks * common.block_size)
        blocks = common.block_table[:, :num_blocks].long()
        hidden = self._hidden(context, seq_lens, num_blocks * common.block_size)
        return FlexMetadata(common.slot_mapping, tokens, real, blocks, context, hidden, mask)

    def _hidden(self, context: Tensor, seq_lens: Tensor, num_keys: int) -> Tensor:
        first = torch.zeros_like(context)
        if self.spec.window is not None:
            first = (context - self.spec.window + 1).clamp(min=0)
        if self.spec.chunk_size is not None:
            first = context // self.spec.chunk_size * self.spec.chunk_size
        keys = torch.arange(num_keys, device=self.device)
        return (keys >= seq_lens[:, None]) | (keys < first[:, None])

    def _mask(self, context: Tensor, seq_lens: Tensor, num_queries: int, num_keys: int) -> BlockMask:
        window = self.spec.window
        chunk = self.spec.chunk_size

        def seen(request: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            position = context[request] + query
            visible = (key <= position) & (key < seq_lens[request])
            if window is not None:
                visible = visible & (key > position - window)
            if chunk is not None:
                visible = visible & (key >= position // chunk * chunk)
            return visible

        return create_block_mask(seen, len(context), None, num_queries, num_keys, device=self.device)


class FlexImpl(AttentionImpl):
    """Gathers, attends, and puts the rows back."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: FlexMetadata
    ) -> Tensor:
        if key is not None and value is not None:
            _write(key, value, kv_cache, metadata.slot_mapping)
        keys, values = (self._gather(kv_cache[:, half], metadata, query.dtype) for half in (0, 1))
        padded = query[metadata.tokens].transpose(1, 2)
        score = self._score(metadata.context)
        attended, aux = _attention(query.device.type)(
            padded, keys, values, score_mod=score, block_mask=metadata.mask, scale=self.spec.scale,
            enable_gqa=self.spec.num_heads != self.spec.num_kv_heads, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        if self.tensors.sinks is not None:
            # A sink takes a share of the softmax: 1 - 1 / (1 + exp(lse - sink)).
            attended = attended * torch.sigmoid(aux.lse - self.tensors.sinks.float()[:, None])[..., None].to(
                query.dtype
            )
        rows = attended.transpose(1, 2).reshape(-1, self.spec.num_heads, self.spec.head_size)
        output = torch.empty_like(query)
        output[: len(metadata.real)] = rows.index_select(0, metadata.real)
        return output

    def store(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: FlexMetadata) -> None:
        _write(key, value, kv_cache, metadata.slot_mapping)

    def _gather(self, half: Tensor, metadata: FlexMetadata, dtype: torch.dtype) -> Tensor:
        """[N, block, Hkv, D] -> [R, Hkv, S, D]."""
        picked = half[metadata.blocks].flatten(1, 2)
        return picked.to(dtype).masked_fill(metadata.hidden[:, :, None, None], 0).transpose(1, 2)

    def _score(self, context: Tensor) -> Callable[..., Tensor] | None:
        cap = slopes = None
        if self.spec.soft_cap is None and self.spec.alibi_slopes is None:
            return None
        if self.spec.soft_cap is not None:  # as a tensor: the compiler would make a float that changes of a number
            cap = torch.full((), self.spec.soft_cap, dtype=torch.float32, device=context.device)
        if self.spec.alibi_slopes is not None:
            slopes = torch.tensor(self.spec.alibi_slopes, dtype=torch.float32, device=context.device)

        def score(value: Tensor, request: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if cap is not None:
                value = cap * torch.tanh(value / cap)
            if slopes is not None:
                value = value + slopes[head] * (key - query - context[request])
            return value

        return score


def _write(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Padding goes to the null block, as zeros."""
    padding = (slot_mapping < 0)[:, None, None]
    slots = slot_mapping.clamp(min=0)
    blocks, offsets = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    kv_cache[blocks, 0, offsets] = key.masked_fill(padding, 0)
    kv_cache[blocks, 1, offsets] = value.masked_fill(padding, 0)


@cache
def _attention(device: str) -> Any:
    """Compiled where it pays; the shapes of steps differ, so they are symbols."""
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


class FlexBackend(AttentionBackend):
    """flex_attention on any device that torch compiles for."""

    name = "FLEX_ATTENTION"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16", "float32"}),
        kv_dtypes=frozenset({"auto", "bfloat16"}),
        sliding_window=True,
        chunked_local=True,
        soft_cap=True,
        sinks=True,
        alibi=True,
    )
    metadata_builder = FlexBuilder
    impl = FlexImpl
    block_dim = 0

    cache_shape = staticmethod(TritonBackend.cache_shape)
