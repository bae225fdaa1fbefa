"""How TRITON_ATTN attends to prompts on Hopper GPUs: by kernels/triton/prompt_attention.py, where that takes the layer;
its plan of a step, and its launch. Knows nothing about requests that decode."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import CommonAttentionMetadata
from pagemill.model.kernels.gpu_facts import heads_in_l2, is_hopper, num_processors

LOG2_E = 1.4426950408889634
ROWS = 128
RECORD = 8
"""Rows of a tile, and numbers that say what it is, as in prompt_attention.py."""
BYTES_OF_TOKEN = 2 * 2
"""For each element of a head: of its key and its value."""
_GROUPS = (1, 2, 4, 8, 16)
"""Query heads of a key head: the copy engine fetches boxes whose sizes are powers of two."""


@dataclass(frozen=True, slots=True)
class _Size:
    """How the kernel is cut for a head size."""

    keys: int
    """Of a turn."""
    stages: int
    """Turns whose keys and values shared memory holds."""
    queries: int
    """Tiles whose queries it holds."""


_SIZES = {64: _Size(128, 2, 2), 128: _Size(128, 2, 2), 256: _Size(64, 2, 1)}


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The tiles of a step's queries, as the kernel takes them."""

    records: Tensor
    """[tiles, RECORD] int32: what each tile is."""
    first_tile: Tensor
    """[num_requests + 1] int32, of which the last is the number of tiles."""
    num_requests: int
    num_tiles: int
    """Most that there may be."""
    counter: Tensor
    """[1] int32: of the work, how much has been taken."""
    heads_at_once: int
    """Key heads to which programs attend at the same time."""


def takes(spec: AttentionLayerSpec, device: torch.device) -> bool:
    """Whether the kernel computes such a layer there."""
    group = spec.num_heads // spec.num_kv_heads
    fits = spec.head_size in _SIZES and spec.alibi_slopes is None and group in _GROUPS
    return fits and is_hopper(device)


def takes_cache(query: Tensor, kv_cache: Tensor) -> bool:
    """Whether it reads a cache [N, 2, block, Hkv, D]: of the query's type, two bytes, with dense tokens."""
    width = kv_cache.shape[3] * kv_cache.shape[4]
    dense = kv_cache.stride()[2:] == (width, kv_cache.shape[4], 1)
    whole = kv_cache.stride(0) % width == 0 and kv_cache.stride(1) % width == 0 and kv_cache.data_ptr() % 16 == 0
    strides = query.stride()
    aligned = strides[2] == 1 and strides[0] % 8 == 0 and strides[1] % 8 == 0 and query.data_ptr() % 16 == 0
    return query.dtype == kv_cache.dtype and query.element_size() == 2 and dense and whole and aligned


def plan(
    spec: AttentionLayerSpec, common: CommonAttentionMetadata, records: Tensor, first_tile: Tensor,
    tile_request: Tensor, num_tiles: int,
) -> PromptPlan:  # fmt: skip
    """From the tiles of a step, as attention_plan.plan_items leaves them. `records`, int32, has room for two records
    for each tile, as found and sorted, and for one more: the counter."""
    from pagemill.model.kernels.triton import launch  # deferred: triton
    from pagemill.model.kernels.triton.prompt_attention import plan_prompts, sort_prompts

    counter = records[:1]
    ordered, found = records[RECORD:].view(2, -1, RECORD)
    launch.on(plan_prompts, (num_tiles,))(
        found, counter, common.query_start, common.seq_lens, first_tile, tile_request, common.num_requests,
        TILE_TOKENS=ROWS // (spec.num_heads // spec.num_kv_heads), PAGE=common.block_size, WINDOW=spec.window or 0,
        CHUNK=spec.chunk_size or 0, PDL=launch.dependent(), **launch.options(1),
    )  # fmt: skip
    launch.on(sort_prompts, (num_tiles,))(
        ordered, found, first_tile, common.num_requests, PDL=launch.dependent(), **launch.options(4),
    )  # fmt: skip
    return PromptPlan(ordered, first_tile, common.num_requests, num_tiles, counter, _heads_at_once(spec, common))


def plan_ends(
    spec: AttentionLayerSpec, common: CommonAttentionMetadata, records: Tensor, decode_tokens: int
) -> PromptPlan:
    """Of every request with more than `decode_tokens` tokens, the tile with its last one. `records`, int32, has room
    for a record for each request, and for one more: the number of tiles, and the counter."""
    from pagemill.model.kernels.triton import launch  # deferred: triton
    from pagemill.model.kernels.triton.prompt_attention import plan_last_tiles

    total = records[:1]
    counter = records[4:5]  # at an address of whole 16 bytes, like all others
    found = records[RECORD:]
    launch.on(plan_last_tiles, (common.num_requests,))(
        found, total, counter, common.query_start, common.seq_lens, common.num_requests, DECODE_TOKENS=decode_tokens,
        TILE_TOKENS=ROWS // (spec.num_heads // spec.num_kv_heads), PAGE=common.block_size, WINDOW=spec.window or 0,
        CHUNK=spec.chunk_size or 0, PDL=launch.dependent(), **launch.options(4),
    )  # fmt: skip
    return PromptPlan(found, total, 0, common.num_requests, counter, spec.num_kv_heads)


def _heads_at_once(spec: AttentionLayerSpec, common: CommonAttentionMetadata) -> int:
    """Where the host does not know lengths, all: then there are few tokens."""
    if common.batch_lens is None:
        return spec.num_kv_heads
    num_tokens = int(common.batch_lens.seq_lens.sum())
    return heads_in_l2(spec.num_kv_heads, num_tokens * spec.head_size * BYTES_OF_TOKEN)


def attend(
    spec: AttentionLayerSpec, sinks: Tensor | None, output: Tensor, query: Tensor, kv_cache: Tensor,
    common: CommonAttentionMetadata, prompts: PromptPlan,
) -> None:  # fmt: skip
    """output, query [T, H, D]; kv_cache [N, 2, block, Hkv, D]."""
    from pagemill.model.kernels.triton import launch  # deferred: triton
    from pagemill.model.kernels.triton.prompt_attention import attend_to_prompts, cache_map, query_map

    size = _SIZES[spec.head_size]
    box = min(common.block_size & -common.block_size, size.keys)
    width = kv_cache.stride(2)
    programs = min(num_processors(query.device), prompts.num_tiles * spec.num_kv_heads)
    launch.on(attend_to_prompts, (programs,))(
        cache_map(kv_cache, box), query_map(query, spec.num_heads // spec.num_kv_heads), output,
        output if sinks is None else sinks, prompts.records, prompts.counter, common.block_table,
        prompts.first_tile, prompts.num_requests, prompts.heads_at_once, spec.scale * LOG2_E, spec.soft_cap or 1.0,
        kv_cache.stride(0) // width, kv_cache.stride(1) // width, common.block_table.stride(0),
        output.stride(0), output.stride(1),
        HKV=spec.num_kv_heads, GROUP=spec.num_heads // spec.num_kv_heads, HEAD=spec.head_size, KEYS=size.keys,
        PAGE=common.block_size, BOX=box, STAGES=size.stages, QUERIES=size.queries, WINDOW=spec.window or 0,
        CHUNK=spec.chunk_size or 0, HAS_CAP=spec.soft_cap is not None, HAS_SINKS=sinks is not None,
        PDL=launch.dependent(), **launch.options(4),
    )  # fmt: skip
