"""FLASH_ATTN: FlashAttention 2 or 3 over the paged cache, by whoever provides it here (flash_providers.py)."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from pagemill.model.attention.backends.triton_attn import TritonBackend, write_kv
from pagemill.model.attention.capability import (
    ANY_CONTEXT,
    AttentionContext,
    AttentionLayerSpec,
    Capability,
    Compute,
    MultipleOf,
)
from pagemill.model.attention.flash_providers import FlashProvider, FlashStep, providers
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    CommonAttentionMetadata,
    MetadataBuilder,
)
from pagemill.model.kernels.kv_target import KVTarget

logger = logging.getLogger(__name__)
MAX_HEAD_SIZE = 256


class FlashPlan:
    """The step; the provider plans it when a layer first says of which type its queries are."""

    def __init__(self, common: CommonAttentionMetadata) -> None:
        self.common = common
        self._step: FlashStep | None = None

    def step(self, provider: FlashProvider, spec: AttentionLayerSpec, dtype: torch.dtype) -> FlashStep:
        """The provider's plan of the step, made once."""
        if self._step is None:
            self._step = provider.plan(spec, self.common, dtype)
        return self._step


class FlashBuilder(MetadataBuilder):
    """Nothing is planned on the host."""

    graph_support = AttentionCGSupport.UNIFORM_BATCH
    """Version 2 packs the heads of a decode batch in a way that mixed batches do not allow; version 3 says ALWAYS."""

    def build(self, common: CommonAttentionMetadata) -> FlashPlan:
        return FlashPlan(common)


class FlashImpl(AttentionImpl):
    """One call per layer."""

    provider: ClassVar[FlashProvider | None] = None

    def write_target(self, kv_cache: Tensor, metadata: FlashPlan) -> KVTarget:
        return KVTarget(kv_cache[:, 0], kv_cache[:, 1], metadata.common.slot_mapping)

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: FlashPlan
    ) -> Tensor:
        if self.provider is None:
            raise RuntimeError("FLASH_ATTN runs with the provider that FlashBackend.configured() chose")
        if key is not None and value is not None:
            write_kv(key, value, kv_cache, metadata.common.slot_mapping)
        num_tokens = metadata.common.num_tokens
        step = metadata.step(self.provider, self.spec, query.dtype)
        keys, values = kv_cache[:, 0], kv_cache[:, 1]
        attended = self.provider.attend(query[:num_tokens], keys, values, self.spec, step, self.tensors)
        if num_tokens == len(query):
            return attended
        output = torch.empty_like(query)
        output[:num_tokens] = attended
        return output

    def store(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: FlashPlan) -> None:
        write_kv(key, value, kv_cache, metadata.common.slot_mapping)


class FlashBackend(AttentionBackend):
    """FlashAttention on a GPU."""

    name = "FLASH_ATTN"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        kv_dtypes=frozenset({"auto", "bfloat16"}),
        block_sizes=MultipleOf(16),
        sliding_window=True,
        soft_cap=True,
        compute=((8, 0), (99, 9)),
    )
    metadata_builder = FlashBuilder
    impl = FlashImpl
    block_dim = 0
    cache_shape = staticmethod(TritonBackend.cache_shape)

    @classmethod
    def unsupported(
        cls, spec: AttentionLayerSpec, device: str, dtype: str, where: AttentionContext = ANY_CONTEXT
    ) -> list[str]:
        reasons = super().unsupported(spec, device, dtype, where)
        if spec.head_size > MAX_HEAD_SIZE or spec.head_size % 8:
            reasons.append(f"head size {spec.head_size} not supported")
        if reasons:
            return reasons
        here = _of_version(where)
        if not here:
            return [_nobody(where)]
        lacks = [_lacks(provider, spec, where) for provider in here]
        return sorted({reason for reasons in lacks for reason in reasons}) if all(lacks) else []

    @classmethod
    def configured(cls, spec: AttentionLayerSpec, where: AttentionContext) -> type[AttentionBackend]:
        """The same with the first provider that can do it."""
        fitting = [provider for provider in _of_version(where) if not _lacks(provider, spec, where)]
        return _with_provider(fitting[0], where.compute) if fitting else cls

    @staticmethod
    def describe(provider: FlashProvider) -> str:
        """The line that start-up logs about a provider."""
        return f"FLASH_ATTN is FlashAttention {provider.version} of {provider.name}"


def _of_version(where: AttentionContext) -> Sequence[FlashProvider]:
    wanted = where.flash_attn_version
    return [provider for provider in providers(where.compute) if wanted in (None, provider.version)]


def _nobody(where: AttentionContext) -> str:
    version = "" if where.flash_attn_version is None else f" {where.flash_attn_version}"
    return f"FlashAttention{version} not installed (torch >= 2.12, flash-attn, flash_attn_interface)"


def _lacks(provider: FlashProvider, spec: AttentionLayerSpec, where: AttentionContext) -> list[str]:
    """What of it this provider cannot do."""
    wants = {
        f"block size {where.block_size} not supported by {provider.name}": where.block_size is not None
        and where.block_size % provider.block_multiple != 0,
        f"soft cap not supported by {provider.name}": spec.soft_cap is not None and not provider.soft_cap,
    }
    return [reason for reason, lacking in wants.items() if lacking]


@cache
def _with_provider(chosen: FlashProvider, compute: Compute | None) -> type[AttentionBackend]:
    logger.info(FlashBackend.describe(chosen))

    class Builder(FlashBuilder):
        if chosen.version >= 3:
            graph_support = AttentionCGSupport.ALWAYS

    class Impl(FlashImpl):
        provider = chosen

    class Backend(FlashBackend):
        metadata_builder = Builder
        impl = Impl

    return Backend
