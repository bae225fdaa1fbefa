"""TRITON_ATTN: paged attention by the Triton kernels, decode and prefill in one batch, safe to capture in a graph.

Knows nothing about capturing: addresses depend only on the number of requests, and lengths are read on the device.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.backends import hopper_prompts
from pagemill.model.attention.capability import (
    ONE_BYTE_KV,
    SAME_KV,
    AttentionLayerSpec,
    Capability,
    MultipleOf,
)
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import (
    AttentionBackend,
    AttentionImpl,
    CommonAttentionMetadata,
    MetadataBuilder,
)
from pagemill.model.kernels.gpu_facts import num_processors
from pagemill.model.kernels.kv_target import KVTarget
from pagemill.model.kernels.triton.attention_tiles import Tiles, power_of_two, split_budget, tiles_for
from pagemill.utils.math import ceil_div

MOST_PARTS = 512
"""Of one request, by all its key heads: merging more takes longer than they save."""
MERGE_PROGRAMS = 1024
"""Of all requests together, where there are not more requests than that."""
FEW_PARTS = 5
"""Up to so many parts of a request on average, the last program to finish one merges them, instead of a kernel."""
MERGED_AT_ONCE = 16
"""Of one request by itself, whatever the number of its parts, if MERGE_REGISTERS registers of a thread hold so many:
that is faster than a kernel, but for heads of 64."""
MERGE_REGISTERS = 128
SMALL_BATCH = 64
"""Requests up to which one variant of the planning kernel does."""
MIN_PREFIX = 256
MIN_SHARING = 8
"""Tokens of a common prefix, and requests, from which on it is attended to apart."""


@dataclass(frozen=True, slots=True)
class Partial:
    """What parts of the keys gave, to be merged; see kernels/triton/attention.py."""

    out: Tensor
    """[items, Hkv, rows, D] float32, D a power of two."""
    lse: Tensor


@dataclass(frozen=True, slots=True)
class Items:
    """A list of work, in memory that stays where it is; see kernels/triton/attention_plan.py."""

    first: Tensor
    request: Tensor


@dataclass(frozen=True, slots=True)
class Cascade:
    """The keys that all requests of a step share, attended to once for all of them."""

    prefix_len: int
    splits: int
    """Parts of these keys."""
    num_items: int
    """Parts x tiles of queries."""
    partial: Partial


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """The plan of one step."""

    common: CommonAttentionMetadata
    splits: Items
    tiles: Items
    partial: Partial
    """Of `splits`."""
    arrived: Tensor
    """[R, Hkv] int32, all 0: how many parts of a request are done, while the kernel runs."""
    merges: bool
    """By a kernel of its own."""
    num_splits: int
    """Most items that the plan may have: the grid. 0: no request decodes."""
    num_tiles: int
    """0: every request decodes."""
    decode: Tiles
    prefill: Tiles
    cascade: Cascade | None = None
    prompts: hopper_prompts.PromptPlan | None = None
    """How the tiles are attended to on Hopper GPUs; None: by the kernel for all devices."""
    ends: hopper_prompts.PromptPlan | None = None
    """Those of them that have rows that are asked for, where the host knows which have; None: any may have."""


class TritonBuilder(MetadataBuilder):
    """One small kernel divides the work of a step. Buffers are kept per number of requests (rounded up to a power of
    two), so that a step of the same size finds them at the same addresses."""

    graph_support = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        spec: AttentionLayerSpec,
        device: torch.device,
        decode: Tiles | None = None,
        prefill: Tiles | None = None,
        decode_tokens: int = 1,
        prompts: bool = True,
    ) -> None:
        """`decode_tokens`: requests of at most so many tokens have their keys split. `prompts`: whether prompts may be
        attended to by the kernel for Hopper GPUs."""
        super().__init__(spec, device)
        self.decode_tokens = decode_tokens
        self._verifying: dict[int, TritonBuilder] = {}
        """Tokens of a request -> what plans steps that verify drafts."""
        self._group = spec.num_heads // spec.num_kv_heads
        self._decode = decode or tiles_for("decode", self._group, spec.head_size, self.decode_tokens)
        self._prefill = prefill or tiles_for("prefill", self._group, spec.head_size)
        self._resident = num_processors(device) * self._decode.programs_per_sm
        self._slots = max(1, self._resident // spec.num_kv_heads)
        self._most_parts = max(1, MOST_PARTS // spec.num_kv_heads)
        self._splits: dict[int, tuple[Items, Partial, Tensor]] = {}
        self._tiles: dict[tuple[int, int], Items] = {}
        self._has_prompts = prompts and hopper_prompts.takes(spec, device)
        if self._has_prompts:
            self._prefill = replace(self._prefill, rows=hopper_prompts.ROWS)
        self._records: dict[int, Tensor] = {}
        self._end_records: dict[int, Tensor] = {}

    def build(self, common: CommonAttentionMetadata) -> TritonMetadata:
        if common.decode_len > self.decode_tokens:
            return self._for(common.decode_len).build(common)
        from pagemill.model.kernels.triton import launch  # deferred: triton
        from pagemill.model.kernels.triton.attention_plan import plan_items

        spec = self.spec
        requests = common.num_requests
        tile_tokens = self._prefill.rows // self._group
        has_tiles = common.max_query_len > self.decode_tokens
        num_tiles = common.num_tokens // tile_tokens + requests if has_tiles else 0
        budget = split_budget(requests, self._slots)
        splits, partial, arrived = self._splits_of(power_of_two(requests))
        tiles = self._tiles_of(power_of_two(requests), power_of_two(num_tiles) if num_tiles else 1)
        num_splits = (
            0 if common.min_query_len > self.decode_tokens else min(requests + budget, self._most_parts * requests)
        )
        cascade = self._cascade(common)
        launch.on(plan_items, (requests,))(
            common.query_start, common.seq_lens, splits.first, splits.request, tiles.first, tiles.request, requests,
            budget, self._slots, self._decode.min_share, self._most_parts, cascade.prefix_len if cascade else 0,
            DECODE_TOKENS=self.decode_tokens, TILE_TOKENS=tile_tokens, WINDOW=spec.window or 0,
            CHUNK=spec.chunk_size or 0, BLOCK_N=self._decode.keys,
            BLOCK_R=SMALL_BATCH if requests <= SMALL_BATCH else power_of_two(requests), PDL=launch.dependent(),
            **launch.options(),
        )  # fmt: skip
        alone = _merges_alone(partial, self._decode, requests)
        merges = cascade is not None or not (alone or requests + budget <= FEW_PARTS * requests)
        prompts = self._plan_prompts(common, tiles, num_tiles) if num_tiles and self._has_prompts else None
        ends = self._plan_ends(common) if prompts and common.asks_for_ends else None
        return TritonMetadata(
            common, splits, tiles, partial, arrived, merges, num_splits, num_tiles, self._decode, self._prefill,
            cascade, prompts, ends,
        )  # fmt: skip

    def _plan_prompts(self, common: CommonAttentionMetadata, tiles: Items, count: int) -> hopper_prompts.PromptPlan:
        most = len(tiles.request)
        if most not in self._records:
            self._records[most] = self._ints((2 * most + 1) * hopper_prompts.RECORD)
        return hopper_prompts.plan(self.spec, common, self._records[most], tiles.first, tiles.request, count)

    def _plan_ends(self, common: CommonAttentionMetadata) -> hopper_prompts.PromptPlan:
        most = power_of_two(common.num_requests)
        if most not in self._end_records:
            self._end_records[most] = self._ints((1 + most) * hopper_prompts.RECORD)
        return hopper_prompts.plan_ends(self.spec, common, self._end_records[most], self.decode_tokens)

    def _for(self, decode_tokens: int) -> "TritonBuilder":
        if decode_tokens not in self._verifying:
            self._verifying[decode_tokens] = TritonBuilder(
                self.spec, self.device, decode_tokens=decode_tokens, prompts=self._has_prompts
            )
        return self._verifying[decode_tokens]

    def _splits_of(self, requests: int) -> tuple[Items, Partial, Tensor]:
        if requests not in self._splits:
            most = max(count + split_budget(count, self._slots) for count in range(1, requests + 1))
            items = Items(self._ints(requests + 1), self._ints(most))
            partial = self._partial(most, self._group * self.decode_tokens)
            self._splits[requests] = items, partial, self._ints(requests * self.spec.num_kv_heads)
        return self._splits[requests]

    def _tiles_of(self, requests: int, tiles: int) -> Items:
        if (requests, tiles) not in self._tiles:
            self._tiles[requests, tiles] = Items(self._ints(requests + 1), self._ints(tiles))
        return self._tiles[requests, tiles]

    def _ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _partial(self, items: int, rows: int) -> Partial:
        shape = (items, self.spec.num_kv_heads, rows)
        dims = max(16, power_of_two(self.spec.head_size))
        return Partial(
            torch.empty(*shape, dims, dtype=torch.float32, device=self.device),
            torch.empty(shape, dtype=torch.float32, device=self.device),
        )

    def cascades(self, prefix_len: int, num_requests: int) -> bool:
        """As `CascadePlanner` says."""
        spec = self.spec
        bounded = spec.window is not None or spec.chunk_size is not None or spec.alibi_slopes is not None
        return prefix_len >= MIN_PREFIX and num_requests >= MIN_SHARING and not bounded

    def _cascade(self, common: CommonAttentionMetadata) -> Cascade | None:
        """For a step of requests that decode, if reading their common prefix once pays."""
        spec = self.spec
        prefix = common.common_prefix_len
        if common.max_query_len > self.decode_tokens or not self.cascades(prefix, common.num_requests):
            return None
        tiles = ceil_div(common.num_tokens, self._prefill.rows // self._group)
        parts = max(1, min(self._resident // (spec.num_kv_heads * tiles), prefix // self._decode.min_share))
        return Cascade(prefix, parts, parts * tiles, self._partial(parts * tiles, self._prefill.rows))


@dataclass(frozen=True, slots=True)
class _Role:
    """One launch of the kernel."""

    tiles: Tiles
    num_items: int
    cascade: int = 0
    """1: without the shared prefix; 2: the shared prefix only."""
    split: bool = True


def _merges_alone(partial: Partial, tiles: Tiles, num_requests: int) -> bool:
    """Whether there is one request, of which the program that ends last merges any number of parts."""
    rows = power_of_two(partial.out.shape[2])
    size = partial.out.shape[3]
    return num_requests == 1 and size > 64 and MERGED_AT_ONCE * rows * size <= MERGE_REGISTERS * 32 * tiles.warps


class TritonImpl(AttentionImpl):
    """Writes keys and values, attends to the splits and the tiles, merges the splits."""

    def __init__(self, spec: AttentionLayerSpec) -> None:
        super().__init__(spec)
        self._slopes: Tensor | None = None

    def write_target(self, kv_cache: Tensor, metadata: TritonMetadata) -> KVTarget:
        tensors = self.tensors
        slots = metadata.common.slot_mapping
        return KVTarget(kv_cache[:, 0], kv_cache[:, 1], slots, tensors.key_scale, tensors.value_scale)

    def for_asked_rows(self, metadata: TritonMetadata) -> TritonMetadata:
        return metadata if metadata.ends is None else replace(metadata, prompts=metadata.ends)

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: TritonMetadata
    ) -> Tensor:
        if key is not None and value is not None:
            write_kv(
                key, value, kv_cache, metadata.common.slot_mapping, self.tensors.key_scale, self.tensors.value_scale
            )
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        step = metadata
        if step.cascade is not None:
            self._attend(output, query, kv_cache, step, _Role(step.prefill, step.cascade.num_items, cascade=2))
        if step.num_splits:
            role = _Role(step.decode, step.num_splits, int(step.cascade is not None))
            self._attend(output, query, kv_cache, step, role)
        if step.prompts is not None and hopper_prompts.takes_cache(query, kv_cache):
            sinks = self.tensors.sinks
            hopper_prompts.attend(self.spec, sinks, output, query, kv_cache, step.common, step.prompts)
        elif step.num_tiles:
            self._attend(output, query, kv_cache, step, _Role(step.prefill, step.num_tiles, split=False))
        if step.num_splits and step.merges:
            self._merge(output, step)
        return output

    def store(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: TritonMetadata) -> None:
        tensors = self.tensors
        write_kv(key, value, kv_cache, metadata.common.slot_mapping, tensors.key_scale, tensors.value_scale)

    def _attend(self, output: Tensor, query: Tensor, kv_cache: Tensor, metadata: TritonMetadata, role: "_Role") -> None:
        from pagemill.model.kernels.triton import launch  # deferred: triton
        from pagemill.model.kernels.triton.attention import paged_attention

        spec = self.spec
        common = metadata.common
        tensors = self.tensors
        cascade = metadata.cascade
        items = metadata.splits if role.split else metadata.tiles
        partial = metadata.partial if cascade is None or role.cascade < 2 else cascade.partial
        tiles = role.tiles.for_elements(query.element_size())
        keys, values = kv_cache[:, 0], kv_cache[:, 1]
        slopes = self._slopes_on(query.device)
        merge = MERGED_AT_ONCE if _merges_alone(partial, tiles, common.num_requests) else 1
        launch.on(paged_attention, (spec.num_kv_heads, role.num_items))(
            output, partial.out, partial.lse, metadata.arrived, query, keys, values, common.block_table,
            common.query_start, common.seq_lens, items.first, items.request, tensors.sinks, slopes,
            tensors.key_scale, tensors.value_scale,
            common.num_requests if role.cascade < 2 else common.num_tokens, spec.scale, spec.soft_cap or 1.0,
            cascade.prefix_len if cascade else 0, cascade.splits if cascade else 1,
            query.stride(0), query.stride(1), output.stride(0), output.stride(1), common.block_table.stride(0),
            keys.stride(0), keys.stride(1), keys.stride(2),
            GROUP=spec.num_heads // spec.num_kv_heads, HEAD=spec.head_size, BLOCK_D=partial.out.shape[3],
            BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, PAGE=common.block_size, ROWS=partial.out.shape[2],
            WINDOW=spec.window or 0, CHUNK=spec.chunk_size or 0, HAS_CAP=spec.soft_cap is not None,
            HAS_SINKS=tensors.sinks is not None, HAS_ALIBI=slopes is not None, SCALED=kv_cache.element_size() == 1,
            SPLIT=role.split, CASCADE=role.cascade,
            MERGE=merge if role.split and not metadata.merges else 0,
            MERGE_ROWS=power_of_two(partial.out.shape[2]), PDL=launch.dependent(), num_stages=tiles.stages,
            **launch.options(tiles.warps),
        )  # fmt: skip

    def _merge(self, output: Tensor, metadata: TritonMetadata) -> None:
        from pagemill.model.kernels.triton import launch  # deferred: triton
        from pagemill.model.kernels.triton.attention import merge_splits

        spec = self.spec
        partial = metadata.partial
        cascade = metadata.cascade
        prefix = cascade.partial if cascade else partial
        rows = partial.out.shape[2]
        # Of many requests few are split, and programs that find nothing to do cost time, too.
        parts = max(1, min(rows * spec.num_kv_heads, MERGE_PROGRAMS // metadata.common.num_requests))
        launch.on(merge_splits, (metadata.common.num_requests, parts))(
            output, partial.out, partial.lse, prefix.out, prefix.lse, metadata.common.query_start,
            metadata.splits.first, output.stride(0), output.stride(1), cascade.splits if cascade else 1,
            GROUP=spec.num_heads // spec.num_kv_heads, HEAD=spec.head_size, BLOCK_D=partial.out.shape[3],
            ROWS=rows, PREFIX_ROWS=prefix.out.shape[2], KV_HEADS=spec.num_kv_heads, BLOCK_S=32,
            CASCADE=int(cascade is not None), PDL=launch.dependent(), **launch.options(2),
        )  # fmt: skip

    def _slopes_on(self, device: torch.device) -> Tensor | None:
        """The ALiBi slopes, sent to the device once."""
        if self.spec.alibi_slopes is not None and self._slopes is None:
            self._slopes = torch.tensor(self.spec.alibi_slopes, dtype=torch.float32, device=device)
        return self._slopes


def write_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """key, value [T, Hkv, D] with dense heads, any stride between tokens -> kv_cache [N, 2, block, Hkv, D], at the
    slots of slot_mapping [T]; a negative one is skipped. A cache of 1-byte floats gets key / key_scale, saturated."""
    from pagemill.model.kernels.triton import launch  # deferred: triton
    from pagemill.model.kernels.triton.cache_write import write_cache

    num_tokens, heads, head_size = key.shape
    keys, values = kv_cache[:, 0], kv_cache[:, 1]
    scaled = kv_cache.element_size() == 1
    launch.on(write_cache, (num_tokens,))(
        key, value, keys, values, slot_mapping, key_scale, value_scale, key.stride(0), value.stride(0),
        keys.stride(0), keys.stride(1), keys.stride(2), torch.finfo(kv_cache.dtype).max,
        HEADS=heads, HEAD=head_size, PAGE=kv_cache.shape[2], SCALED=scaled, BLOCK=power_of_two(heads * head_size),
        PDL=launch.dependent(), **launch.options(),
    )  # fmt: skip


class TritonBackend(AttentionBackend):
    """Triton kernels on a GPU."""

    name = "TRITON_ATTN"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16", "float32"}),
        kv_dtypes=SAME_KV | ONE_BYTE_KV,
        block_sizes=MultipleOf(16),
        sliding_window=True,
        chunked_local=True,
        soft_cap=True,
        sinks=True,
        alibi=True,
    )
    metadata_builder = TritonBuilder
    impl = TritonImpl
    block_dim = 0
    package = "triton"

    @staticmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """[num_blocks, 2, block_size, Hkv, D]: keys, then values of a block; a token's heads are contiguous."""
        return (num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_size)
