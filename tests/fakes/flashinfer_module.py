"""A FlashInfer of plain torch: what the FLASHINFER backend asks of the library, as its documentation says.

A captured wrapper reads nothing but its buffers when it runs, of which the lengths lie in the plan's: whoever replays
it without a new plan computes an old step.
"""

import dataclasses
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch import Tensor

from pagemill.model.attention.backends import flashinfer as backend_module
from pagemill.model.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl


class Wrapper:
    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8
        self.num_plans = 0

    def _keep(self, spec: tuple[int, int, int, int, int, float | None, float]) -> None:
        self.heads, self.kv_heads, self.head_size, self.page, self.window, self.cap, self.scale = spec
        self.num_plans += 1


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(workspace, layout)
        self.captured = use_cuda_graph
        self.begins, self.pages = paged_kv_indptr_buffer, paged_kv_indices_buffer
        last = paged_kv_last_page_len_buffer if use_cuda_graph else None
        self.size = None if last is None else len(last)
        self.plan_memory = torch.zeros(8 << 20, dtype=torch.uint8)

    def reset_workspace_buffer(self, workspace: Tensor, plan_memory: Tensor) -> None:
        self.plan_memory = plan_memory

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(indices) == indptr[-1] and bool((last_page_len >= 1).all())
        assert self.size in (None, len(last_page_len)), "the batch size should be fixed in cudagraph mode"
        self._keep((num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap, sm_scale))
        if self.captured:
            assert self.begins is not None and self.pages is not None
            self.begins.copy_(indptr)
            self.pages[: len(indices)].copy_(indices)
        else:
            self.begins, self.pages = indptr.clone(), indices.clone()
        lens = (indptr.diff() - 1) * page_size + last_page_len
        self.plan_memory.view(torch.int32)[: len(lens)].copy_(lens)

    def run(self, query: Tensor, cache: Tensor, out: Tensor) -> None:
        assert self.begins is not None and self.pages is not None
        lens = self.plan_memory.view(torch.int32)[: len(query)].long()[:, None]
        width = torch.arange(len(self.pages))
        places = (self.begins[:-1, None] + width).clamp(max=len(self.pages) - 1).long()
        pages = torch.where(width < self.begins.diff()[:, None], self.pages[places], 0)
        keys, values = (half[pages.long()].flatten(1, 2) for half in cache.unbind(1))
        position = torch.arange(keys.shape[1])
        hidden = position >= lens
        if self.window >= 0:
            hidden = hidden | (position < lens - 1 - self.window)
        out.copy_(_attend(query, keys, values, hidden[:, None], self))


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal and len(indices) == indptr[-1]
        self._keep((num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap, sm_scale))
        self.queries = qo_indptr.tolist()
        self.blocks = torch.tensor_split(indices.clone(), indptr[1:-1].tolist())
        self.lens = ((indptr.diff() - 1) * page_size + last_page_len).tolist()

    def run(self, query: Tensor, cache: Tensor, out: Tensor) -> None:
        for blocks, length, begin, end in zip(self.blocks, self.lens, self.queries[:-1], self.queries[1:], strict=True):
            keys, values = (half[blocks.long()].flatten(0, 1)[:length] for half in cache.unbind(1))
            row, column = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)
            hidden = column > row
            if self.window >= 0:
                hidden = hidden | (column < row - self.window)
            count = end - begin
            out[begin:end] = _attend(
                query[begin:end],
                keys.expand(count, -1, -1, -1),
                values.expand(count, -1, -1, -1),
                hidden[:, None],
                self,
            )


def _attend(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, told: Wrapper) -> Tensor:
    """query [R, H, D], keys and values [R, K, Hkv, D], hidden [R, 1, K] -> [R, H, D]."""
    keys, values = (part.repeat_interleave(told.heads // told.kv_heads, 2).float() for part in (keys, values))
    scores = torch.einsum("rhd,rkhd->rhk", query.float(), keys) * told.scale
    if told.cap:
        scores = told.cap * torch.tanh(scores / told.cap)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, values.nan_to_num(0.0)).to(query.dtype)


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """As the kernel; padding goes to the null block, as zeros."""
    padding, size = (slots < 0)[:, None, None], kv_cache.shape[2]
    places = slots.clamp(min=0)
    for index, part in enumerate((key, value)):
        kv_cache[places // size, index, places % size] = part.masked_fill(padding, 0)


class CpuImpl(FlashInferImpl):
    def write_target(self, kv_cache: Tensor, metadata: object) -> None:  # type: ignore[override]
        """On a CPU the kernel before attention asks for values, which no graph can."""
        return


class CpuFlashInfer(FlashInferBackend):
    """FLASHINFER where the fake is installed."""

    name = "TEST_FLASHINFER"
    capability = dataclasses.replace(
        FlashInferBackend.capability,
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        head_sizes=None,
    )
    impl = CpuImpl


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the library until the test ends."""
    module = types.ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(module, wrapper.__name__, wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(backend_module, "write_kv", write_kv)
    monkeypatch.setattr(backend_module, "WORKSPACE_BYTES", 1 << 10)
