"""TRITON_INVARIANT: paged attention in which a token has the same bits alone, in any batch, and however its prompt was
cut into steps; see kernels/triton/invariant_attention.py. Safe to capture in a graph."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.backends.triton_attn import SMALL_BATCH, Items, write_kv
from pagemill.model.attention.capability import AttentionLayerSpec, Capability, MultipleOf
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import AttentionBackend, AttentionImpl, CommonAttentionMetadata, MetadataBuilder
from pagemill.model.kernels.gpu_facts import is_hopper
from pagemill.model.kernels.kv_target import KVTarget
from pagemill.model.kernels.triton.attention_tiles import power_of_two, tiles_for

KEYS = 64
"""Of a turn, for decoding rows and prompts alike."""
SHORTEST = 256
"""Keys of a segment, at least."""
MOST_SEGMENTS = 16
"""Of invariant_attention.py."""
PROGRAMS = 512
"""Of requests that decode, by key heads and lanes, where there are not more requests than that."""
STAGES = 2
"""Of the loop of a decoding program: with fewer, more programs share a multiprocessor."""
FEW_STAGES = {32: 4, 256: 2}
"""On Hopper GPUs, by the most requests times key heads: turns that come ahead for the four warps of
invariant_decoding.py. With more of them, programs of one warp keep the GPU busy."""
FEW_LANES = 4
"""At least so many programs for a request and key head, as some requests may be long among short ones."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What segments gave, to be folded; see invariant_attention.attend_decoding."""

    sums: Tensor
    tops: Tensor
    totals: Tensor
    arrived: Tensor


@dataclass(frozen=True, slots=True)
class InvariantMetadata:
    """The plan of one step."""

    common: CommonAttentionMetadata
    tiles: Items
    num_tiles: int
    """Most that the plan may have: the grid. 0: every request decodes."""
    parts: Parts | None
    """None: no request decodes."""
    lanes: int
    """Programs for the segments of a request and key head."""


class InvariantBuilder(MetadataBuilder):
    """Buffers are kept per number of requests (rounded up to a power of two), so that a step of the same size finds
    them at the same addresses."""

    graph_support = AttentionCGSupport.ALWAYS

    def __init__(self, spec: AttentionLayerSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._group = spec.num_heads // spec.num_kv_heads
        self._tile_tokens = tile_tokens(spec)
        self._parts: dict[int, Parts] = {}
        self._tiles: dict[tuple[int, int], Items] = {}

    def build(self, common: CommonAttentionMetadata) -> InvariantMetadata:
        from pagemill.model.kernels.triton import launch  # deferred: triton
        from pagemill.model.kernels.triton.invariant_attention import plan_tiles

        requests = common.num_requests
        num_tiles = common.num_tokens // self._tile_tokens + 2 * requests if common.max_query_len > 1 else 0
        tiles = self._tiles_of(power_of_two(requests), power_of_two(num_tiles) if num_tiles else 1)
        if num_tiles:
            launch.on(plan_tiles, (requests,))(
                common.query_start, common.seq_lens, tiles.first, tiles.request, requests,
                TILE_TOKENS=self._tile_tokens,
                BLOCK_R=SMALL_BATCH if requests <= SMALL_BATCH else power_of_two(requests), PDL=launch.dependent(),
                **launch.options(),
            )  # fmt: skip
        parts = None if common.min_query_len > 1 else self._parts_of(power_of_two(requests))
        programs = self.spec.num_kv_heads * requests
        lanes = max(FEW_LANES, min(MOST_SEGMENTS, power_of_two(PROGRAMS // programs + 1)))
        return InvariantMetadata(common, tiles, num_tiles, parts, lanes)

    def _parts_of(self, requests: int) -> Parts:
        if requests not in self._parts:
            spec = self.spec
            shape = (requests, spec.num_kv_heads, MOST_SEGMENTS, self._group)
            sums = torch.empty(*shape, power_of_two(spec.head_size), dtype=torch.float32, device=self.device)
            tops = torch.empty(shape, dtype=torch.float32, device=self.device)
            self._parts[requests] = Parts(sums, tops, torch.empty_like(tops), self._ints(requests * spec.num_kv_heads))
        return self._parts[requests]

    def _tiles_of(self, requests: int, tiles: int) -> Items:
        if (requests, tiles) not in self._tiles:
            self._tiles[requests, tiles] = Items(self._ints(requests + 1), self._ints(tiles))
        return self._tiles[requests, tiles]

    def _ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)


def tile_tokens(spec: AttentionLayerSpec) -> int:
    """Of a tile of a prompt's queries: a power of two, as the lengths at which segments grow are multiples of it."""
    group = spec.num_heads // spec.num_kv_heads
    return tiles_for("prefill", group, spec.head_size).rows // power_of_two(group)


class InvariantImpl(AttentionImpl):
    """Writes keys and values, attends to them for the requests that decode, and for the others."""

    def write_target(self, kv_cache: Tensor, metadata: InvariantMetadata) -> KVTarget:
        return KVTarget(kv_cache[:, 0], kv_cache[:, 1], metadata.common.slot_mapping, invariant=True)

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, metadata: InvariantMetadata
    ) -> Tensor:
        if key is not None and value is not None:
            write_kv(key, value, kv_cache, metadata.common.slot_mapping)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if metadata.parts is not None:
            self._attend_decoding(output, query, kv_cache, metadata, metadata.parts)
        if metadata.num_tiles:
            self._attend_prompts(output, query, kv_cache, metadata)
        return output

    def store(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: InvariantMetadata) -> None:
        write_kv(key, value, kv_cache, metadata.common.slot_mapping)

    def _attend_decoding(
        self, output: Tensor, query: Tensor, kv_cache: Tensor, metadata: InvariantMetadata, parts: Parts
    ) -> None:
        from pagemill.model.kernels.triton import launch  # deferred: triton
        from pagemill.model.kernels.triton.invariant_attention import attend_decoding

        spec = self.spec
        common = metadata.common
        stages = self._few_stages(common.num_requests, query)
        if stages:
            self._attend_few(output, query, kv_cache, metadata, parts, stages)
            return
        keys, values = kv_cache[:, 0], kv_cache[:, 1]
        group = spec.num_heads // spec.num_kv_heads
        launch.on(attend_decoding, (spec.num_kv_heads, common.num_requests, metadata.lanes))(
            output, parts.sums, parts.tops, parts.totals, parts.arrived, query, keys, values, common.block_table,
            common.query_start, common.seq_lens, spec.scale, spec.soft_cap or 1.0,
            query.stride(0), query.stride(1), output.stride(0), output.stride(1), common.block_table.stride(0),
            keys.stride(0), keys.stride(1), keys.stride(2),
            GROUP=group, HEAD=spec.head_size, BLOCK_D=parts.sums.shape[-1], BLOCK_M=max(16, power_of_two(group)),
            BLOCK_N=KEYS, PAGE=common.block_size, SHORTEST=SHORTEST, HAS_CAP=spec.soft_cap is not None,
            PDL=launch.dependent(), num_stages=STAGES, **launch.options(1),
        )  # fmt: skip

    def _few_stages(self, num_requests: int, query: Tensor) -> int:
        """Of the kernel for few programs; 0 where it is not taken."""
        if self.spec.soft_cap is not None or query.element_size() != 2 or not is_hopper(query.device):
            return 0
        pairs = num_requests * self.spec.num_kv_heads
        return next((stages for most, stages in FEW_STAGES.items() if pairs <= most), 0)

    def _attend_few(
        self, output: Tensor, query: Tensor, kv_cache: Tensor, metadata: InvariantMetadata, parts: Parts, stages: int
    ) -> None:
        from pagemill.model.kernels.triton import launch  # deferred: triton
        from pagemill.model.kernels.triton.invariant_decoding import attend_few_decoding

        spec = self.spec
        common = metadata.common
        keys, values = kv_cache[:, 0], kv_cache[:, 1]
        group = spec.num_heads // spec.num_kv_heads
        launch.on(attend_few_decoding, (spec.num_kv_heads, common.num_requests, metadata.lanes))(
            output, parts.sums, parts.tops, parts.totals, parts.arrived, query, keys, values, common.block_table,
            common.query_start, common.seq_lens, spec.scale,
            query.stride(0), query.stride(1), output.stride(0), output.stride(1), common.block_table.stride(0),
            keys.stride(0), keys.stride(1), keys.stride(2),
            GROUP=group, HEAD=spec.head_size, BLOCK_D=parts.sums.shape[-1], BLOCK_M=max(16, power_of_two(group)),
            PAGE=common.block_size, SHORTEST=SHORTEST, STAGES=stages, PDL=launch.dependent(), **launch.options(),
        )  # fmt: skip

    def _attend_prompts(self, output: Tensor, query: Tensor, kv_cache: Tensor, metadata: InvariantMetadata) -> None:
        from pagemill.model.kernels.triton import launch  # deferred: triton
        from pagemill.model.kernels.triton.invariant_attention import attend_prompts

        spec = self.spec
        common = metadata.common
        keys, values = kv_cache[:, 0], kv_cache[:, 1]
        group = spec.num_heads // spec.num_kv_heads
        tiles = tiles_for("prefill", group, spec.head_size)
        launch.on(attend_prompts, (spec.num_kv_heads, metadata.num_tiles))(
            output, query, keys, values, common.block_table, common.query_start, common.seq_lens, metadata.tiles.first,
            metadata.tiles.request, common.num_requests, spec.scale, spec.soft_cap or 1.0,
            query.stride(0), query.stride(1), output.stride(0), output.stride(1), common.block_table.stride(0),
            keys.stride(0), keys.stride(1), keys.stride(2),
            GROUP=group, HEAD=spec.head_size, BLOCK_D=power_of_two(spec.head_size), BLOCK_M=tiles.rows, BLOCK_N=KEYS,
            TILE_TOKENS=tile_tokens(spec), PAGE=common.block_size, SHORTEST=SHORTEST, HAS_CAP=spec.soft_cap is not None,
            PDL=launch.dependent(), num_stages=tiles.stages, **launch.options(tiles.warps),
        )  # fmt: skip


class InvariantTritonBackend(AttentionBackend):
    """Rows of the same bits, on a GPU."""

    name = "TRITON_INVARIANT"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        head_sizes=(64, 80, 96, 112, 128),
        block_sizes=MultipleOf(16),
        soft_cap=True,
        deterministic=True,
    )
    metadata_builder = InvariantBuilder
    impl = InvariantImpl
    block_dim = 0
    package = "triton"

    @staticmethod
    def cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """[num_blocks, 2, block_size, Hkv, D]: keys, then values of a block; a token's heads are contiguous."""
        return (num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_size)
