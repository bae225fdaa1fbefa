"""Plan the KV cache: which layers share a block table, and how many blocks the memory holds. Pure functions.

Knows nothing about requests in flight or about tensors.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec
from pagemill.utils.math import ceil_div

MAX_REGULAR_GROUPS = 8
NEARLY_EQUAL = 1.25


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    *,
    max_model_len: int,
    max_step_tokens: int,
    num_blocks_override: int | None = None,
) -> KVCacheConfig:
    """Layer name -> spec, and bytes -> the plan.

    Raises ConfigError when there are no layers, when their pages cannot be made equally large, and when one request
    of `max_model_len` tokens, at most `max_step_tokens` of them in a step, does not fit; the latter names the
    largest --max-model-len that does.
    """
    if not specs:
        raise ConfigError("the model declares no layer that keeps keys and values; nothing can be cached")
    groups = group_layers(equal_pages(specs))
    page_bytes = groups[0].spec.page_bytes()
    block_bytes = page_bytes * max(len(group.layers) for group in groups)
    num_blocks = num_blocks_override if num_blocks_override is not None else available_bytes // block_bytes
    config = KVCacheConfig(num_blocks, groups)
    _check_one_request_fits(config, max_model_len, max_step_tokens, block_bytes)
    return config


def merge_specs(per_worker: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """The layers of all workers. Raises ConfigError when two workers disagree about a layer."""
    merged: dict[str, KVCacheSpec] = {}
    for specs in per_worker:
        for name, spec in specs.items():
            if merged.setdefault(name, spec) != spec:
                raise ConfigError(f"workers disagree about what layer {name!r} keeps: {merged[name]} and {spec}")
    return merged


def usable_bytes(per_worker: Sequence[Mapping[str, KVCacheSpec]], available_bytes: Sequence[int]) -> int:
    """Bytes that the cache of all layers may take so that each worker's part of it fits in what that worker has.

    A pipeline stage keeps its own layers only, so that it has room for more blocks than its bytes would suggest.
    Raises ConfigError as `merge_specs` and `equal_pages` do.
    """
    merged = merge_specs(per_worker)
    if not merged:
        return min(available_bytes)
    groups = group_layers(equal_pages(merged))
    page_bytes = groups[0].spec.page_bytes()
    layers_each = [max(sum(name in specs for name in group.layers) for group in groups) for specs in per_worker]
    num_blocks = min(
        num_bytes // (page_bytes * num_layers)
        for num_bytes, num_layers in zip(available_bytes, layers_each, strict=True)
        if num_layers
    )
    return num_blocks * page_bytes * max(len(group.layers) for group in groups)


def equal_pages(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The specs with larger blocks where pages are smaller, so that all pages have the same size.

    Raises ConfigError when the largest page is no multiple of another.
    """
    page_bytes = max(spec.page_bytes() for spec in specs.values())
    equal = {}
    for name, spec in specs.items():
        factor, rest = divmod(page_bytes, spec.page_bytes())
        if rest:
            raise ConfigError(
                f"layer {name!r} keeps {spec.page_bytes()} bytes per block, which does not divide the {page_bytes} "
                "bytes of the largest; such a model is not supported"
            )
        equal[name] = spec if factor == 1 else dataclasses.replace(spec, block_size=spec.block_size * factor)
    return equal


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs, in groups of at most `group_size` layers; groups of full attention come first."""
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    size = group_size([len(layers) for layers in kinds.values()])
    ordered = sorted(kinds.items(), key=lambda item: type(item[0]) is not FullAttentionSpec)
    return tuple(
        KVCacheGroup(tuple(layers[start : start + size]), spec)
        for spec, layers in ordered
        for start in range(0, len(layers), size)
    )


def group_size(counts: Sequence[int]) -> int:
    """Layers per group, from the number of layers of each kind.

    A regular pattern (20 and 30) divides without waste, if that takes few groups; nearly equal counts (24 and 25)
    make one group each; else the rarest kind fills one group and the last group of the others is padded (52 and 10:
    seven groups of 10, the last of which has 2 layers).
    """
    regular = math.gcd(*counts)
    if sum(counts) // regular <= MAX_REGULAR_GROUPS:
        return regular
    if max(counts) < NEARLY_EQUAL * min(counts):
        return max(counts)
    return min(counts)


def peak_blocks(spec: KVCacheSpec, num_tokens: int, step_tokens: int) -> int:
    """Most blocks of one group that a request holds at once until `num_tokens` tokens are computed, at most
    `step_tokens` in a step."""
    steady = spec.max_blocks(num_tokens) + ceil_div(step_tokens, spec.block_size)
    return min(ceil_div(num_tokens, spec.block_size), steady)


def blocks_for_request(groups: Iterable[KVCacheGroup], num_tokens: int, step_tokens: int) -> int:
    """Most blocks of all groups together that one request holds at once."""
    return sum(peak_blocks(group.spec, num_tokens, step_tokens) for group in groups)


def _check_one_request_fits(config: KVCacheConfig, max_len: int, step_tokens: int, block_bytes: int) -> None:
    usable = config.num_blocks - 1
    needed = blocks_for_request(config.groups, max_len, step_tokens)
    if needed <= usable:
        return
    low, high = 0, max_len
    while high - low > 1:
        middle = (low + high) // 2
        fits = blocks_for_request(config.groups, middle, step_tokens) <= usable
        low, high = (middle, high) if fits else (low, middle)
    problem = (
        f"max_model_len={max_len} needs {needed + 1} KV cache blocks ({(needed + 1) * block_bytes} bytes), "
        f"and there are {max(config.num_blocks, 0)} ({max(config.num_blocks, 0) * block_bytes} bytes)"
    )
    remedy = f"use --max-model-len {low} or less, or " if low > 1 else ""
    raise ConfigError(f"{problem}; {remedy}give more memory with --kv-cache-memory-bytes")
