"""FLASHINFER: the paged wrappers of the optional package flashinfer, for decode and for mixed batches.

It plans on the host, so a step's lengths must be there. Of decode batches that are captured, the kernels are in the
graph and the plan is not: it is renewed before each replay.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from pagemill.model.attention.backends.triton_attn import TritonBackend, write_kv
from pagemill.model.attention.capability import ONE_BYTE_KV, AttentionLayerSpec, Capability
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    CommonAttentionMetadata,
    MetadataBuilder,
    StepOnHost,
)
from pagemill.model.kernels.gpu_facts import num_processors
from pagemill.model.kernels.kv_target import KVTarget
from pagemill.model.kernels.triton.attention_tiles import power_of_two
from pagemill.utils.math import ceil_div

WORKSPACE_BYTES = 256 << 20
ALIGNMENT_BYTES = 64
"""That the library leaves between what it puts there."""
PLAN_BYTES = 256 << 10
"""Of a captured plan: some 13 bytes for each program and 8 for each request."""
MIN_GROUP_FOR_MATRIX_UNITS = 4
"""Query heads per key head from which decode on matrix units is the faster."""


class FlashInferPlan:
    """The step; planned when a layer first says of which types its queries and its cache are, if not before."""

    def __init__(self, builder: "FlashInferBuilder", common: CommonAttentionMetadata, wrapper: Any = None) -> None:
        self.common = common
        self._builder = builder
        self._wrapper = wrapper

    def wrapper(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
        """FlashInfer's wrapper for these types, planned for the step."""
        if self._wrapper is None:
            self._wrapper = self._builder.planned(self.common, dtype, kv_dtype)
        return self._wrapper


class FlashInferBuilder(MetadataBuilder):
    """Keeps the wrappers: one for any decode batch, one for other batches, and one for each size of decode batch that
    is captured, whose plan lies at addresses that stay and is renewed before each replay."""

    graph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, spec: AttentionLayerSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._decode: Any = None
        self._prefill: Any = None
        self._captured: dict[int, Any] = {}
        self._types: tuple[torch.dtype, torch.dtype] | None = None
        """Of queries and of the cache."""
        self._pages = torch.empty(0, dtype=torch.int32, device=device)
        """Of the captured sizes: steps run one after the other, so that all have room in the same place."""
        self._plans: Tensor | None = None
        """Likewise what a plan has on the device."""
        self._sent: torch.cuda.Event | None = None
        """The last plan has left the host's memory."""

    def build(self, common: CommonAttentionMetadata) -> FlashInferPlan:
        return FlashInferPlan(self, common, self._captured[common.num_requests] if common.replayed else None)

    def planned(self, common: CommonAttentionMetadata, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
        """A wrapper with the step's plan."""
        self._types = (dtype, kv_dtype)
        start, seq_lens = _on_host(common)
        rows = torch.arange(common.num_requests, device=self.device)
        step = StepOnHost(seq_lens, rows, common.block_table, common.block_size)
        if common.max_query_len == 1 and common.num_tokens == common.num_requests:
            return self._plan(self._decode_wrapper(), step)
        return self._plan(self._prefill_wrapper(), step, start)

    def before_replay(self, step: StepOnHost) -> None:
        """Raises RuntimeError for a builder that has planned no step yet: a shape runs before it is captured."""
        size = len(step.seq_lens)
        if size not in self._captured:
            self._captured[size] = self._wrapper_of_size(size, step.block_table.shape[1])
        self._plan(self._captured[size], step)

    def _plan(self, wrapper: Any, step: StepOnHost, query_start: Tensor | None = None) -> Any:
        """The wrapper, with the plan of a step; `query_start` [R + 1] on the host, where requests have many tokens."""
        if self._types is None:
            raise RuntimeError("FLASHINFER cannot plan a step before one ran")
        spec = self.spec
        size = step.block_size
        pages = (step.seq_lens + size - 1) // size
        begins = torch.zeros(len(pages) + 1, dtype=torch.int32)
        begins[1:] = pages.cumsum(0)
        last = (step.seq_lens - (pages - 1) * size).int()
        options = {
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.soft_cap,
            "sm_scale": spec.scale,
            "q_data_type": self._types[0],
            "kv_data_type": self._types[1],
        }
        if query_start is not None:
            options["causal"] = True
        queries = () if query_start is None else (query_start,)
        if self._sent is not None:
            self._sent.synchronize()  # the library writes its next plan to where the last one is copied from
        wrapper.plan(
            *queries, begins, _page_ids(step, begins.to(self.device, non_blocking=True), int(begins[-1])), last,
            spec.num_heads, spec.num_kv_heads, spec.head_size, size, **options,
        )  # fmt: skip
        if self.device.type == "cuda":
            self._sent = self._sent or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()
        return wrapper

    def _decode_wrapper(self) -> Any:
        if self._decode is None:
            self._decode = self._new_decode_wrapper(_workspace(self.device, "decode", WORKSPACE_BYTES))
        return self._decode

    def _wrapper_of_size(self, size: int, width: int) -> Any:
        """For `size` requests of up to `width` blocks, all of it at addresses that stay."""
        if len(self._pages) < size * width:
            self._pages = torch.zeros(size * width, dtype=torch.int32, device=self.device)
        if self._plans is None:
            self._plans = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self.device)
        workspace = _workspace(self.device, "decode", self._workspace_bytes(size))
        wrapper = self._new_decode_wrapper(
            workspace,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=self.device),
            paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=torch.zeros(size, dtype=torch.int32, device=self.device),
        )
        wrapper.reset_workspace_buffer(workspace, self._plans)
        return wrapper

    def _workspace_bytes(self, size: int) -> int:
        """What a captured decode step of so many requests puts aside: on matrix units it is split, and padded, whatever
        the lengths are (flashinfer/attention/scheduler.cuh: a tile is 16 rows, or 64 or 128 for larger groups). A power
        of two, so that sizes share their memory."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        rows = 16 if group <= 16 else 64 if group <= 64 else 128
        tiles = max(2 * num_processors(self.device) // spec.num_kv_heads, ceil_div(size * group, rows) + size - 1)
        needed = spec.num_heads * tiles * rows * (spec.head_size + 1) * 4 + ALIGNMENT_BYTES
        return max(WORKSPACE_BYTES, power_of_two(needed))

    def _new_decode_wrapper(self, workspace: Tensor, **buffers: Any) -> Any:
        import flashinfer  # deferred: an optional package

        grouped = self.spec.num_heads // self.spec.num_kv_heads >= MIN_GROUP_FOR_MATRIX_UNITS
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped, **buffers)

    def _prefill_wrapper(self) -> Any:
        import flashinfer  # deferred: an optional package

        if self._prefill is None:
            self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                _workspace(self.device, "prefill", WORKSPACE_BYTES), "NHD"
            )
        return self._prefill


def _on_host(common: CommonAttentionMetadata) -> tuple[Tensor, Tensor]:
    """[R + 1] int32 and [R] int64; waits for the device where the host was not told."""
    start = common.query_start_host
    lens = common.seq_lens_host
    start = common.query_start.cpu() if start is None else start
    return start, (common.seq_lens.cpu() if lens is None else lens).long()


def _page_ids(step: StepOnHost, begins: Tensor, count: int) -> Tensor:
    """[count] int32: the blocks of all requests, one after the other; `begins` [R + 1] on the device."""
    places = torch.arange(count, dtype=torch.int32, device=begins.device)
    owners = torch.searchsorted(begins[1:], places, right=True)
    return step.block_table[step.slots.long()[owners], places - begins[owners]]


@cache
def _workspace(device: torch.device, purpose: str, num_bytes: int) -> Tensor:
    """Layers run one after the other, so that all share one."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


class FlashInferImpl(AttentionImpl):
    """One run of the wrapper per layer."""

    def __init__(self, spec: AttentionLayerSpec) -> None:
        super().__init__(spec)
        self._scales: dict[str, float] | None = None

    def write_target(self, kv_cache: Tensor, metadata: FlashInferPlan) -> KVTarget:
        tensors = self.tensors
        slots = metadata.common.slot_mapping
        return KVTarget(kv_cache[:, 0], kv_cache[:, 1], slots, tensors.key_scale, tensors.value_scale)

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: FlashInferPlan
    ) -> Tensor:
        tensors = self.tensors
        num_tokens = metadata.common.num_tokens
        if key is not None and value is not None:
            slots = metadata.common.slot_mapping
            write_kv(key, value, kv_cache, slots, tensors.key_scale, tensors.value_scale)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        wrapper = metadata.wrapper(query.dtype, kv_cache.dtype)
        wrapper.run(query[:num_tokens].contiguous(), kv_cache, out=output[:num_tokens], **self._scales_of(kv_cache))
        return output

    def store(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: FlashInferPlan) -> None:
        tensors = self.tensors
        write_kv(key, value, kv_cache, metadata.common.slot_mapping, tensors.key_scale, tensors.value_scale)

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
    package = "flashinfer"
    cache_shape = staticmethod(TritonBackend.cache_shape)
