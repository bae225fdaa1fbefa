"""CPU_ATTN: paged attention by the native kernels, straight from the block table, without gathering."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayerSpec,
    Capability,
    CommonAttentionMetadata,
    MetadataBuilder,
)
from pagemill.model.kernels.native import DTYPES, library, loaded_library


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    """The step as the kernels take it: addresses and sizes. `common` keeps the tensors alive."""

    common: CommonAttentionMetadata
    query_start: int
    seq_lens: int
    block_table: int
    slot_mapping: int
    table_stride: int


class CpuBuilder(MetadataBuilder):
    """Looks the addresses up once per step."""

    def build(self, common: CommonAttentionMetadata) -> CpuMetadata:
        return CpuMetadata(
            common,
            common.query_start.data_ptr(),
            common.seq_lens.data_ptr(),
            common.block_table.data_ptr(),
            common.slot_mapping.data_ptr(),
            common.block_table.stride(0),
        )


class CpuImpl(AttentionImpl):
    """Two calls per layer: write the cache, attend."""

    def __init__(self, spec: AttentionLayerSpec) -> None:
        super().__init__(spec)
        self._library = loaded_library()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: CpuMetadata) -> Tensor:
        spec, common = self.spec, metadata.common
        _, num_blocks, num_kv_heads, block_size, head_size = kv_cache.shape
        cache, dtype = kv_cache.data_ptr(), DTYPES[query.dtype]
        self._library.pm_write_kv(
            cache, key.data_ptr(), value.data_ptr(), metadata.slot_mapping, key.stride(0), value.stride(0),
            common.num_tokens, num_blocks, block_size, num_kv_heads, head_size, dtype,
        )  # fmt: skip
        output = torch.empty(query.shape, dtype=query.dtype)
        self._library.pm_paged_attention(
            output.data_ptr(), query.data_ptr(), cache, metadata.query_start, metadata.seq_lens, metadata.block_table,
            query.stride(0), common.num_requests, metadata.table_stride, num_blocks, block_size, spec.num_heads,
            num_kv_heads, head_size, spec.window or 0, spec.scale, spec.soft_cap or 0.0, dtype,
            torch.get_num_threads(),
        )  # fmt: skip
        return output


class CpuBackend(AttentionBackend):
    """Native kernels on a CPU."""

    name = "CPU_ATTN"
    capability = Capability(
        devices=frozenset({"cpu"}), dtypes=frozenset({"float32", "bfloat16"}), sliding_window=True, soft_cap=True
    )
    metadata_builder = CpuBuilder
    impl = CpuImpl

    @classmethod
    def missing(cls, spec: AttentionLayerSpec, device: str, dtype: str) -> list[str]:
        reasons = super().missing(spec, device, dtype)
        return reasons if library() is not None else [*reasons, "native kernels not available"]

    @staticmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """[2, num_blocks, Hkv, block_size, D]: keys, then values; a head's part of a block is contiguous."""
        return (2, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size)
