"""CPU_ATTN: paged attention by the native kernels, straight from the block table, without gathering.

Knows nothing about instruction sets or threads; see kernels/.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.capability import (
    ANY_CONTEXT,
    INT8_KV,
    SAME_KV,
    AttentionContext,
    AttentionLayerSpec,
    Capability,
)
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    CommonAttentionMetadata,
    MetadataBuilder,
)
from pagemill.model.kernels import native
from pagemill.model.kernels.mirrors import Batch, Layer

INT8_MULTIPLE = 16
INT8_MAX_HEAD = 1024
"""What the kernels take of a cache of int8: block and head sizes, and the longest head."""


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    """The step as the kernels take it. `common` keeps the tensors alive whose addresses `batch` holds."""

    common: CommonAttentionMetadata
    batch: Batch
    address: int
    """Of `batch`."""


class CpuBuilder(MetadataBuilder):
    """Looks the addresses up once per step."""

    def build(self, common: CommonAttentionMetadata) -> CpuMetadata:
        batch = Batch(
            common.query_start.data_ptr(),
            common.seq_lens.data_ptr(),
            common.block_table.data_ptr(),
            common.slot_mapping.data_ptr(),
            common.num_requests,
            common.num_tokens,
            common.block_table.stride(0),
            common.block_size,
        )
        return CpuMetadata(common, batch, ctypes.addressof(batch))


class CpuImpl(AttentionImpl):
    """One native call per layer."""

    def __init__(self, spec: AttentionLayerSpec) -> None:
        super().__init__(spec)
        self._layer = Layer(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            spec.window or 0,
            spec.chunk_size or 0,
            spec.scale,
            spec.soft_cap or 0.0,
        )
        self._slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes)
        if self._slopes is not None:
            self._layer.slopes = self._slopes.data_ptr()
        self._address = ctypes.addressof(self._layer)

    def native(self) -> Layer:
        self._find_sinks()
        return self._layer

    def _find_sinks(self) -> None:
        if self.spec.has_sinks and self.tensors.sinks is not None:
            self._layer.sinks = self.tensors.sinks.data_ptr()

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: CpuMetadata
    ) -> Tensor:
        self._find_sinks()
        return native.attention(query, key, value, kv_cache, metadata.address, self._address)

    def store(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: CpuMetadata) -> None:
        nobody = Batch.from_buffer_copy(metadata.batch)
        nobody.num_requests = 0
        native.attention(key, key, value, kv_cache, ctypes.addressof(nobody), self._address)


class CpuBackend(AttentionBackend):
    """Native kernels on a CPU."""

    name = "CPU_ATTN"
    capability = Capability(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        kv_dtypes=SAME_KV | INT8_KV,
        sliding_window=True,
        chunked_local=True,
        soft_cap=True,
        sinks=True,
        alibi=True,
        deterministic=True,
    )
    metadata_builder = CpuBuilder
    impl = CpuImpl

    @classmethod
    def unsupported(
        cls, spec: AttentionLayerSpec, device: str, dtype: str, where: AttentionContext = ANY_CONTEXT
    ) -> list[str]:
        reasons = super().unsupported(spec, device, dtype, where)
        if where.kv_cache_dtype in INT8_KV:
            reasons += _int8_reasons(spec.head_size, where)
        return reasons if native.library() is not None else [*reasons, "native kernels not available"]

    @staticmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """[2, num_blocks, Hkv, block_size, D]: keys, then values; a head's part of a block is contiguous,
        and within it the elements lie as kernels/cpu/segment.h says. Of int8, [2, num_blocks, Hkv, block_size, D + 4]:
        the scales are in it."""
        return (2, num_blocks, spec.num_kv_heads, spec.block_size, spec.row_elements())


def _int8_reasons(head_size: int, where: AttentionContext) -> list[str]:
    kind = f"with kv cache dtype {where.kv_cache_dtype}"
    reasons = []
    if head_size % INT8_MULTIPLE or head_size > INT8_MAX_HEAD:
        reasons.append(
            f"head size {head_size} not supported {kind} (allowed: multiples of {INT8_MULTIPLE} up to {INT8_MAX_HEAD})"
        )
    if where.block_size is not None and where.block_size % INT8_MULTIPLE:
        reasons.append(f"block size {where.block_size} not supported {kind} (allowed: multiples of {INT8_MULTIPLE})")
    return reasons
