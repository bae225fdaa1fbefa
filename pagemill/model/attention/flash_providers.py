"""Who provides FlashAttention over paged keys on this machine: torch itself, or an installed package.

Knows their calls. Each is imported when it is first used; none is a dependency.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pagemill.model.attention.capability import AttentionLayerSpec, Compute
from pagemill.model.attention.interface import CommonAttentionMetadata, LayerTensors

SMALL_BLOCKS = 16
LARGE_BLOCKS = 256
"""Tokens of which a block must be a multiple: of version 3, and of version 2 as its authors ship it."""


@dataclass(frozen=True, slots=True)
class FlashStep:
    """One step, as the calls take it."""

    common: CommonAttentionMetadata
    schedule: Tensor | None = None
    """Version 3: which program does what, the same for all layers."""


class FlashProvider(ABC):
    """One way to call it. `version`: 2 or 3."""

    name: ClassVar[str]
    """Of the module that has it."""
    version: int
    block_multiple: int
    soft_cap: ClassVar[bool] = True
    sinks: ClassVar[bool] = False

    def plan(self, spec: AttentionLayerSpec, common: CommonAttentionMetadata, dtype: torch.dtype) -> FlashStep:
        """Once per step and type of query; `common` has tensors on the device."""
        return FlashStep(common)

    @cached_property
    def module(self) -> Any:
        """Imported when it is first asked for."""
        return import_module(self.name)

    @abstractmethod
    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionLayerSpec, step: FlashStep, own: LayerTensors
    ) -> Tensor:
        """query [T, H, D] without padding; keys, values [N, block, Hkv, D], any strides but the last -> [T, H, D]."""


class TorchFlash(FlashProvider):
    """torch.nn.attention.varlen, since torch 2.12."""

    name = "torch.nn.attention.varlen"
    version = 2
    block_multiple = LARGE_BLOCKS
    soft_cap = False

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionLayerSpec, step: FlashStep, own: LayerTensors
    ) -> Tensor:
        common = step.common
        attended: Tensor = self.module.varlen_attn(
            query,
            keys,
            values,
            common.query_start,
            None,
            common.max_query_len,
            common.max_seq_len,
            scale=spec.scale,
            window_size=_window(spec, 0),
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=common.seq_lens,
            block_table=common.block_table,
        )
        return attended


class HopperFlash(FlashProvider):
    """The package of FlashAttention 3."""

    name = "flash_attn_interface"
    version = 3
    block_multiple = SMALL_BLOCKS

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionLayerSpec, step: FlashStep, own: LayerTensors
    ) -> Tensor:
        common = step.common
        attended: Tensor = self.module.flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=common.seq_lens,
            page_table=common.block_table,
            cu_seqlens_q=common.query_start,
            max_seqlen_q=common.max_query_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec, -1 if spec.window is None else 0),
            softcap=spec.soft_cap or 0.0,
        )
        return attended


class PackagedFlash(FlashProvider):
    """The build of both versions in the wheel of vLLM, which takes small blocks."""

    name = "vllm.vllm_flash_attn"
    block_multiple = SMALL_BLOCKS

    def __init__(self, version: int) -> None:
        self.version = version

    def plan(self, spec: AttentionLayerSpec, common: CommonAttentionMetadata, dtype: torch.dtype) -> FlashStep:
        if self.version < 3:
            return FlashStep(common)
        schedule = self.module.get_scheduler_metadata(
            batch_size=common.num_requests,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            num_heads_q=spec.num_heads,
            num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_size,
            cache_seqlens=common.seq_lens,
            qkv_dtype=dtype,
            cu_seqlens_q=common.query_start,
            page_size=common.block_size,
            causal=True,
            window_size=_window(spec, -1 if spec.window is None else 0),
            num_splits=0,
        )
        return FlashStep(common, schedule)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionLayerSpec, step: FlashStep, own: LayerTensors
    ) -> Tensor:
        common = step.common
        extra: dict[str, Any] = {"scheduler_metadata": step.schedule} if self.version >= 3 else {}
        attended: Tensor = self.module.flash_attn_varlen_func(
            query,
            keys,
            values,
            common.max_query_len,
            common.query_start,
            common.max_seq_len,
            seqused_k=common.seq_lens,
            softmax_scale=spec.scale,
            causal=True,
            window_size=list(_window(spec, -1 if spec.window is None else 0)),
            softcap=spec.soft_cap or 0.0,
            block_table=common.block_table,
            fa_version=self.version,
            **extra,
        )
        return attended


class ClassicFlash(FlashProvider):
    """The package flash-attn 2."""

    name = "flash_attn"
    version = 2
    block_multiple = LARGE_BLOCKS

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionLayerSpec, step: FlashStep, own: LayerTensors
    ) -> Tensor:
        common = step.common
        start = torch.zeros(common.num_requests + 1, dtype=torch.int32, device=query.device)
        torch.cumsum(common.seq_lens, 0, dtype=torch.int32, out=start[1:])
        attended: Tensor = self.module.flash_attn_varlen_func(
            query,
            keys,
            values,
            common.query_start,
            start,
            common.max_query_len,
            common.max_seq_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec, -1 if spec.window is None else 0),
            softcap=spec.soft_cap or 0.0,
            block_table=common.block_table,
        )
        return attended


def _window(spec: AttentionLayerSpec, right: int) -> tuple[int, int]:
    """(tokens seen on the left, on the right); -1: all."""
    return (-1 if spec.window is None else spec.window - 1, right)


@cache
def providers(compute: Compute | None) -> Sequence[FlashProvider]:
    """Those that are here and run on this GPU, best first. Imports none of the packages."""
    found: list[FlashProvider] = []
    hopper = compute is not None and compute[0] == 9
    if hopper and find_spec("flash_attn_interface"):
        found.append(HopperFlash())
    for version in (3, 2) if hopper else (2,):
        if _in_package("vllm", f"vllm_flash_attn/_vllm_fa{version}_C*"):
            found.append(PackagedFlash(version))
    if _torch_takes_blocks():
        found.append(TorchFlash())
    if find_spec("flash_attn"):
        found.append(ClassicFlash())
    return found


def _in_package(package: str, pattern: str) -> bool:
    """Whether a package has such a file, without importing anything of it."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return any(any(Path(place).glob(pattern)) for place in places or ())


def _torch_takes_blocks() -> bool:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 12)
