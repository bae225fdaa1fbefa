"""FLASHINFER: the paged wrappers of the optional package flashinfer, for decode and for mixed batches.

It plans on the host, so a step's lengths must be there, and a step cannot be part of a captured graph.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pagemill.model.attention.backends.triton_attn import TritonBackend, write_kv
from pagemill.model.attention.capability import ANYWHERE, ONE_BYTE_KV, Capability, Surroundings
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayerSpec,
    CommonAttentionMetadata,
    MetadataBuilder,
)
from pagemill.model.kernels.kv_target import KVTarget

WORKSPACE_BYTES = 256 << 20
MIN_GROUP_FOR_MATRIX_UNITS = 4
"""Query heads per key head from which decode on matrix units is the faster."""


class FlashInferPlan:
    """The step; planned when a layer first says of which types its queries and its cache are."""

    def __init__(self, builder: "FlashInferBuilder", common: CommonAttentionMetadata) -> None:
        self.common = common
        self._builder = builder
        self._wrapper: Any = None

    def wrapper(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
        """Ready to run."""
        if self._wrapper is None:
            self._wrapper = self._builder.planned(self.common, dtype, kv_dtype)
        return self._wrapper


class FlashInferBuilder(MetadataBuilder):
    """Keeps the wrappers, and lists the pages of each request."""

    def __init__(self, spec: AttentionLayerSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._decode: Any = None
        self._prefill: Any = None

    def build(self, common: CommonAttentionMetadata) -> FlashInferPlan:
        return FlashInferPlan(self, common)

    def planned(self, common: CommonAttentionMetadata, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
        """A wrapper with the step's plan."""
        spec, size = self.spec, common.block_size
        start, seq_lens = _on_host(common)
        pages = (seq_lens + size - 1) // size
        indptr = torch.zeros(len(pages) + 1, dtype=torch.int32)
        indptr[1:] = pages.cumsum(0)
        rows = torch.repeat_interleave(torch.arange(len(pages)), pages)
        columns = torch.arange(int(indptr[-1])) - indptr[:-1].long()[rows]
        places = (rows * common.block_table.stride(0) + columns).to(self.device, non_blocking=True)
        indices = _flat(common.block_table).index_select(0, places)
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_size, size)
        last = (seq_lens - (pages - 1) * size).int()
        options = {
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.soft_cap,
            "sm_scale": spec.scale,
            "q_data_type": dtype,
            "kv_data_type": kv_dtype,
        }
        if common.max_query_len == 1 and common.num_tokens == common.num_requests:
            wrapper = self._decode_wrapper()
            wrapper.plan(indptr, indices, last, *sizes, **options)
        else:
            wrapper = self._prefill_wrapper()
            wrapper.plan(start, indptr, indices, last, *sizes, causal=True, **options)
        return wrapper

    def _decode_wrapper(self) -> Any:
        import flashinfer  # deferred: an optional package

        if self._decode is None:
            grouped = self.spec.num_heads // self.spec.num_kv_heads >= MIN_GROUP_FOR_MATRIX_UNITS
            self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                _workspace(self.device, "decode"), "NHD", use_tensor_cores=grouped
            )
        return self._decode

    def _prefill_wrapper(self) -> Any:
        import flashinfer  # deferred: an optional package

        if self._prefill is None:
            self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(self.device, "prefill"), "NHD")
        return self._prefill


def _on_host(common: CommonAttentionMetadata) -> tuple[Tensor, Tensor]:
    """[R + 1] int32 and [R] int64; waits for the device where the host was not told."""
    start, lens = common.query_start_host, common.seq_lens_host
    start = common.query_start.cpu() if start is None else start
    return start, (common.seq_lens.cpu() if lens is None else lens).long()


def _flat(table: Tensor) -> Tensor:
    """The rows of a table one after the other, with what lies between them."""
    return table.as_strided(((table.shape[0] - 1) * table.stride(0) + table.shape[1],), (1,))


@cache
def _workspace(device: torch.device, purpose: str) -> Tensor:
    """Layers run one after the other, so that all share one."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class FlashInferImpl(AttentionImpl):
    """One run of the wrapper per layer."""

    def __init__(self, spec: AttentionLayerSpec) -> None:
        super().__init__(spec)
        self._scales: dict[str, float] | None = None

    def write_target(self, kv_cache: Tensor, metadata: FlashInferPlan) -> KVTarget:
        tensors, slots = self.tensors, metadata.common.slot_mapping
        return KVTarget(kv_cache[:, 0], kv_cache[:, 1], slots, tensors.key_scale, tensors.value_scale)

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: FlashInferPlan
    ) -> Tensor:
        tensors, num_tokens = self.tensors, metadata.common.num_tokens
        if key is not None and value is not None:
            slots = metadata.common.slot_mapping
            write_kv(key, value, kv_cache, slots, tensors.key_scale, tensors.value_scale)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        wrapper = metadata.wrapper(query.dtype, kv_cache.dtype)
        wrapper.run(query[:num_tokens].contiguous(), kv_cache, out=output[:num_tokens], **self._scales_of(kv_cache))
        return output

    def _scales_of(self, kv_cache: Tensor) -> dict[str, float]:
        """Read from the device once."""
        if self._scales is None:
            self._scales = {}
            if kv_cache.element_size() == 1 and self.tensors.key_scale is not None:
                self._scales["k_scale"] = float(self.tensors.key_scale)
            if kv_cache.element_size() == 1 and self.tensors.value_scale is not None:
                self._scales["v_scale"] = float(self.tensors.value_scale)
        return self._scales


class FlashInferBackend(AttentionBackend):
    """FlashInfer on a GPU."""

    name = "FLASHINFER"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        head_sizes=(64, 128, 256),
        kv_dtypes=frozenset({"auto", "bfloat16"}) | ONE_BYTE_KV,
        block_sizes=(16, 32, 64),
        sliding_window=True,
        soft_cap=True,
        compute=((7, 5), (12, 1)),
    )
    metadata_builder = FlashInferBuilder
    impl = FlashInferImpl
    block_dim = 0
    cache_shape = staticmethod(TritonBackend.cache_shape)

    @classmethod
    def missing(cls, spec: AttentionLayerSpec, device: str, dtype: str, where: Surroundings = ANYWHERE) -> list[str]:
        reasons = super().missing(spec, device, dtype, where)
        return reasons if find_spec("flashinfer") else [*reasons, "the package flashinfer is not installed"]
