"""Allocate the tensors of a planned KV cache and bind them to the layers."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, SharedKVSpec
from pagemill.model.attention.interface import CacheLayer


def bind_kv_cache(plan: KVCacheConfig, layers: Mapping[str, CacheLayer], device: str) -> list[Tensor]:
    """Bind every layer to its view; the i-th layers of all groups share the i-th tensor, and a layer that reads
    another's cache has that one's. Returns the tensors.

    Layers of the plan that are not in `layers` are another pipeline stage's, and take no memory here.

    Memory is zeroed, so that nothing is ever read that was not written here.
    """
    page_bytes = {group.spec.page_bytes() for group in plan.groups}
    if len(page_bytes) != 1:
        raise ConfigError(f"KV groups have unequal page sizes {sorted(page_bytes)} bytes; they must be equal")
    groups = [(group.spec, [name for name in group.layers if name in layers]) for group in plan.groups]
    width = max(len(names) for _, names in groups)
    size = plan.num_blocks * page_bytes.pop()
    tensors = _all_zeros(width, size, device)
    for group_spec, names in groups:
        for owner, tensor in zip(names, tensors, strict=False):
            for name in (owner, *plan.readers(owner)):
                layers[name].bind(tensor, plan.num_blocks, group_spec)
    return tensors


def bind_profile_cache(
    specs: Mapping[str, KVCacheSpec], layers: Mapping[str, CacheLayer], device: str
) -> tuple[KVCacheConfig, list[Tensor]]:
    """The least that lets layers run: the null block. Layers of equal specs are a group; pages may differ in size."""
    shared = {name: spec.owner for name, spec in specs.items() if isinstance(spec, SharedKVSpec)}
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        if name not in shared:
            kinds.setdefault(spec, []).append(name)
    groups = tuple(KVCacheGroup(tuple(names), spec) for spec, names in kinds.items())
    tensors = []
    for group in groups:
        readers = {name: owner for name, owner in shared.items() if owner in group.layers}
        tensors += bind_kv_cache(KVCacheConfig(1, (group,), readers), layers, device)
    return KVCacheConfig(1, groups, shared), tensors


def _zeros(num_bytes: int, device: str) -> Tensor:
    """Zeroed bytes. On a CPU the operating system gives the pages when they are first written, so that a cache costs
    what is used of it; torch.zeros would touch them all. numpy asks for huge pages where the system has them: blocks
    are taken in order, so that no more than one of a tensor is in part unused."""
    if device == "cpu":
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _all_zeros(count: int, num_bytes: int, device: str) -> list[Tensor]:
    """So many tensors of so many bytes. Raises ConfigError where there is no memory for them."""
    try:
        return [_zeros(num_bytes, device) for _ in range(count)]
    except (MemoryError, ValueError, torch.OutOfMemoryError) as error:  # ValueError: more than numpy can count
        raise ConfigError(
            f"there is no memory for a KV cache of {count * num_bytes} bytes; lower --num-gpu-blocks-override or "
            "--kv-cache-memory-bytes"
        ) from error
