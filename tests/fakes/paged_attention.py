"""Random batches over a paged cache, what attention over them is by definition, and a run of any backend on them."""

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import AttentionBackend, CommonAttentionMetadata


def by_definition(
    query: Tensor, keys: Tensor, values: Tensor, spec: AttentionLayerSpec, sinks: Tensor | None = None
) -> Tensor:
    """[Q, H, D], [S, Hkv, D] twice -> [Q, H, D], all float64; the queries are the last Q of S positions."""
    group, seq_len = spec.num_heads // spec.num_kv_heads, len(keys)
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,shd->hqs", query, keys) * spec.scale
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    rows = torch.arange(seq_len - len(query), seq_len, device=query.device).unsqueeze(1)
    columns = torch.arange(seq_len, device=query.device)
    if spec.alibi_slopes:
        slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float64, device=query.device)
        scores = scores + slopes[:, None, None] * (columns - rows)
    hidden = columns > rows
    if spec.window:
        hidden |= columns <= rows - spec.window
    if spec.chunk_size:
        hidden |= columns < rows // spec.chunk_size * spec.chunk_size
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., :seq_len]
    return torch.einsum("hqs,shd->qhd", weights, values)


KV_SCALE = 2.0


@dataclass
class PagedCase:
    """`requests`: (query tokens, all tokens) of each. Unused cache entries are NaN, blocks out of reach the null block,
    and query, key and value are slices of one fused tensor, as projections leave them."""

    spec: AttentionLayerSpec
    requests: list[tuple[int, int]]
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    cache_dtype: torch.dtype | None = None
    """None: dtype. A cache of one-byte floats has everything in it already, in halves for `key_scale` 2."""
    sinks: Tensor | None = field(init=False, default=None)
    prefix: int = 0
    """Tokens that all requests share, whole blocks."""
    null_value: float = torch.nan
    """What the null block is full of."""

    def __post_init__(self) -> None:
        spec, generator = self.spec, torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype).to(self.device)

        blocks = [-(-seq_len // self.block_size) for _, seq_len in self.requests]
        order = (torch.randperm(sum(blocks), generator=generator) + 1).int()
        self.num_blocks = sum(blocks) + 1
        table = torch.zeros(len(blocks), max(blocks) + 2, dtype=torch.int32)
        for row, (count, ids) in enumerate(zip(blocks, torch.split(order, blocks), strict=True)):
            table[row, :count] = ids
        self.full = [random(2, seq_len, spec.num_kv_heads, spec.head_size) for _, seq_len in self.requests]
        for full, row in zip(self.full, table, strict=True):
            full[:, : self.prefix] = self.full[0][:, : self.prefix]
            row[: self.prefix // self.block_size] = table[0, : self.prefix // self.block_size]
        self.slots = [table[row, torch.arange(s) // self.block_size].long() * self.block_size
                      + torch.arange(s) % self.block_size for row, (_, s) in enumerate(self.requests)]  # fmt: skip
        for row, (query_len, seq_len) in enumerate(self.requests):
            table[row, : spec.first_seen(seq_len - query_len) // self.block_size] = 0
        self.table = table.to(self.device)
        tokens = sum(q for q, _ in self.requests)
        fused = random(tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_size)
        self.query, self.key, self.value = torch.split(fused, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        for part, index in ((self.key, 0), (self.value, 1)):
            part.copy_(torch.cat([full[index, s - q :] for full, (q, s) in zip(self.full, self.requests, strict=True)]))
        if spec.has_sinks:
            self.sinks = random(spec.num_heads)

    def common(self) -> CommonAttentionMetadata:
        """The step, with every tensor on the device."""
        lengths = [q for q, _ in self.requests]
        start = torch.tensor([0, *lengths]).cumsum(0).int()
        seq_lens = torch.tensor([s for _, s in self.requests], dtype=torch.int32)
        mapping = torch.cat([slots[len(slots) - q :] for slots, q in zip(self.slots, lengths, strict=True)])
        return CommonAttentionMetadata(
            start.to(self.device), seq_lens.to(self.device), self.table, mapping.to(self.device), len(lengths),
            sum(lengths), max(lengths), int(seq_lens.max()), self.block_size, start, seq_lens, self.prefix,
        )  # fmt: skip

    def padded(self, num_tokens: int, num_requests: int, **told: Any) -> "PagedCase":
        """This step as a captured graph of such a shape sees it, with NaN for tokens that only fill it up."""
        common = self.common()
        count, rows = common.num_tokens, num_requests - common.num_requests

        def more(tensor: Tensor, length: int, value: float) -> Tensor:
            return torch.cat([tensor, tensor.new_full((length, *tensor.shape[1:]), value)])

        step = dataclasses.replace(
            common,
            query_start=more(common.query_start, rows, count),
            seq_lens=more(common.seq_lens, rows, 0),
            block_table=more(common.block_table, rows, 0),
            slot_mapping=more(common.slot_mapping, num_tokens - count, -1),
            num_requests=num_requests,
            num_tokens=num_tokens,
            max_seq_len=common.block_table.shape[1] * common.block_size,
            query_start_host=None,
            seq_lens_host=None,
            **({"max_query_len": num_tokens} | told),
        )
        found = copy.copy(self)
        found.query, found.key, found.value = (
            more(part, num_tokens - count, torch.nan) for part in (self.query, self.key, self.value)
        )
        found.common = lambda: step  # type: ignore[method-assign]
        return found

    def cache(self, backend: type[AttentionBackend]) -> Tensor:
        """The backend's cache with everything that was computed before the step."""
        spec, dtype = self.spec, self.cache_dtype or self.dtype
        kept = FullAttentionSpec(self.block_size, spec.num_kv_heads, spec.head_size, str(dtype).removeprefix("torch."))
        shape = backend.cache_shape(self.num_blocks, kept)
        one_byte = dtype.itemsize == 1
        cache = torch.full(shape, torch.nan, dtype=torch.float32)
        cache.select(backend.block_dim, 0).fill_(self.null_value)
        cache = cache.to(dtype).to(self.device)
        halves = cache.unbind(1) if backend.block_dim == 0 else cache.unbind(0)
        if backend.block_dim == 1:
            halves = tuple(half.transpose(1, 2) for half in halves)
        for full, slots, (query_len, _) in zip(self.full, self.slots, self.requests, strict=True):
            old = slots[: len(slots) if one_byte else len(slots) - query_len].to(self.device)
            for half, part in zip(halves, full / KV_SCALE if one_byte else full, strict=True):
                rows = part[: len(old)].to(dtype).view(torch.uint8 if one_byte else dtype)
                half.view(rows.dtype)[old // self.block_size, old % self.block_size] = rows
        return cache

    def run(self, backend: type[AttentionBackend]) -> Tensor:
        """What the backend makes of the step."""
        impl = backend.impl(self.spec)
        impl.tensors.sinks = self.sinks
        new: tuple[Tensor | None, Tensor | None] = (self.key, self.value)
        if self.cache_dtype is not None:
            impl.tensors.key_scale = torch.full((1,), KV_SCALE, device=self.device)
            impl.tensors.value_scale = torch.full((1,), KV_SCALE, device=self.device)
            new = (None, None)
        plan = backend.metadata_builder(self.spec, torch.device(self.device)).build(self.common())
        return impl.forward(self.query, *new, self.cache(backend), plan)

    def stored(self, backend: type[AttentionBackend]) -> tuple[Tensor, Tensor]:
        """The cache behind the step, and behind its keys and values alone."""
        impl = backend.impl(self.spec)
        impl.tensors.sinks = self.sinks
        plan = backend.metadata_builder(self.spec, torch.device(self.device)).build(self.common())
        attended, only = self.cache(backend), self.cache(backend)
        impl.forward(self.query, self.key, self.value, attended, plan)
        impl.store(self.key, self.value, only, plan)
        return attended, only

    def kept(self, full: Tensor) -> Tensor:
        """Keys or values as the cache gives them back, in float64."""
        if self.cache_dtype is None:
            return full.double()
        return (full / KV_SCALE).to(self.cache_dtype).double() * KV_SCALE

    def expected(self) -> Tensor:
        """The same by definition, in float64."""
        queries = torch.split(self.query.double(), [q for q, _ in self.requests])
        return torch.cat([
            by_definition(query, kept[0], kept[1], self.spec, self.sinks)
            for query, kept in zip(queries, map(self.kept, self.full), strict=True)
        ])  # fmt: skip
