"""How TRITON_MLA attends to prompts: with keys and values of their own for each head, made of the latent vectors of a
request, those kept by earlier steps included, and thrown away after the layer.

A query and a key cost a third of the operations then, and a key is read once for 128 tokens. What is made lies in a
workspace of fixed size: where it is too small for all requests, they come one after the other; for all heads, some
heads after the others; for a request's keys, some keys after the others, and the softmax goes on where it was.
Plans are made on the host, once per step. Knows nothing about requests that decode.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.model.attention.interface import BatchLens, LatentWeights
from pagemill.model.kernels.gpu_facts import is_hopper
from pagemill.utils.math import ceil_div, round_up

WORKSPACE_BYTES = 256 << 20
TILE = 128
PIECE = 32
RECORD = 8
"""Tokens of a tile, latent vectors of a piece, and numbers of a record, as in kernels/triton/mla_prompts.py."""
TOKENS_PER_KEY = 48
"""Tokens that see a key, on average over a request's, from which on it is better to make keys and values of it.
Measured: below 16 for prompts with nothing before them, about 40 for those after 8,192 tokens."""
HEADS_TOGETHER = 16
"""That fill a GPU even with few tiles: fewer are computed together only where one request's keys are too many."""

HEADS_ROUNDED = 4
"""Heads of a pass that has not all are a multiple of so many, if there is room: as many as the L2 cache keeps at the
same time are to divide them."""

_SLACK = 64
"""Bytes by which parts of the workspace are moved to begin at multiples of 16."""

_Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of one layer that keeps latent vectors."""

    heads: int
    kept: int
    """Elements kept of a token."""
    expanded: int
    """Elements of a head's key, without its rotary part, and value."""
    value: int
    element: int
    """Bytes."""

    def bytes_for(self, rows: int, heads: int) -> int:
        """Of the workspace, for the vectors of so many tokens and what is made of them."""
        return rows * (self.kept + self.expanded * heads) * self.element

    def carried_bytes(self, tokens: int, heads: int) -> int:
        """For what is carried from some keys to others."""
        return tokens * heads * carried_bytes(self.value)


class _Part(NamedTuple):
    """Keys of a request, whose first lies in row `base`."""

    request: int
    begin: int
    end: int
    base: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """Some heads, and the keys of some requests, that are computed together."""

    parts: Sequence[_Part]
    first_head: int
    heads: int
    carried_token: int = 0
    num_carried: int = 0
    """Tokens, from `carried_token` on; 0: the requests' keys are all here."""

    @property
    def num_rows(self) -> int:
        return sum(part.end - part.begin for part in self.parts)


@dataclass(frozen=True, slots=True)
class LatentPass:
    """The same on the device."""

    num_rows: int
    """Latent vectors that it reads."""
    pieces: Tensor
    """[n, 4] int32: which, as mla_prompts.gather_latents takes them."""
    records: Tensor
    """[tiles, RECORD] int32, those of the most keys first."""
    counter: Tensor
    """[1] int32, 0 before the first layer: of the work, how much has been taken."""
    ends: Tensor
    ends_counter: Tensor
    """The same of the tiles with the last tokens of requests alone."""
    first_head: int
    heads: int
    carried_token: int
    num_carried: int


class LatentPrompts:
    """A step's requests whose keys and values are made, and how."""

    def __init__(self, lens: BatchLens, chosen: npt.NDArray[np.bool_], device: torch.device, room: int) -> None:
        """`chosen` [R], of which one is true at least; `room`: bytes of the workspace."""
        self._lens = lens
        self._chosen = chosen
        self._device = device
        self._room = room
        self._passes: dict[LatentSizes, list[LatentPass]] = {}
        apart = np.repeat(~chosen, np.diff(lens.query_start))
        self.num_tokens = len(apart)
        """Of the step, padding not included."""
        self.others = _sent([np.flatnonzero(apart).astype(np.int32)], device)[0].long() if apart.any() else None
        """[n] int64, ascending: tokens of the other requests; None: there are none."""

    def passes(self, sizes: LatentSizes) -> Sequence[LatentPass]:
        """For layers of these sizes; planned for the first of them."""
        if sizes not in self._passes:
            self._passes[sizes] = self._planned(sizes)
        return self._passes[sizes]

    def _planned(self, sizes: LatentSizes) -> list[LatentPass]:
        requests = np.flatnonzero(self._chosen).tolist()
        passes = list(_passes(self._lens, requests, sizes, self._room))
        tables = iter(_sent([found for each in passes for found in _tables(each.parts, self._lens)], self._device))
        return [
            LatentPass(
                each.num_rows, next(tables).view(-1, 4), next(tables).view(-1, RECORD), next(tables),
                next(tables).view(-1, RECORD), next(tables), each.first_head, each.heads, each.carried_token,
                each.num_carried,
            )
            for each in passes
        ]  # fmt: skip


def carried_bytes(value_size: int) -> int:
    """Of a token and head: what is carried from some keys to others."""
    return (value_size + 2) * 4


def wanted(lens: BatchLens, value_size: int, room: int) -> npt.NDArray[np.bool_]:
    """[R] whether a request's keys and values are to be made: where enough tokens see a key, and half of the workspace,
    `room` bytes, holds what all of its tokens carry, of one head at least."""
    queries = np.diff(lens.query_start).astype(np.int64)
    keys = lens.seq_lens.astype(np.int64)
    seen_enough = queries * (2 * keys - queries) >= 2 * TOKENS_PER_KEY * keys
    return seen_enough & (queries * carried_bytes(value_size) <= room // 2)


def _passes(lens: BatchLens, requests: Sequence[int], sizes: LatentSizes, room: int) -> Iterator[_Pass]:
    """Requests together as far as the workspace has room for some of their heads."""
    together = min(sizes.heads, HEADS_TOGETHER)
    most = room // sizes.bytes_for(1, together)
    parts: list[_Part] = []
    rows = 0
    for request in requests:
        keys = int(lens.seq_lens[request])
        if keys > most:
            yield from _passes_of_one(lens, request, sizes, room)
            continue
        if rows + keys > most:
            yield from _by_heads(parts, rows, sizes, room)
            parts, rows = [], 0
        parts.append(_Part(request, 0, keys, rows))
        rows += keys
    if parts:
        yield from _by_heads(parts, rows, sizes, room)


def _by_heads(parts: Sequence[_Part], rows: int, sizes: LatentSizes, room: int) -> Iterator[_Pass]:
    """As many heads at once as there is room for."""
    spare = room - sizes.bytes_for(rows, 0)
    most = min(sizes.heads, spare // (rows * sizes.expanded * sizes.element))
    heads = min(most, round_up(ceil_div(sizes.heads, ceil_div(sizes.heads, most)), HEADS_ROUNDED))
    for first in range(0, sizes.heads, heads):
        yield _Pass(parts, first, min(heads, sizes.heads - first))


def _passes_of_one(lens: BatchLens, request: int, sizes: LatentSizes, room: int) -> Iterator[_Pass]:
    """A request with more keys than there is room for: what is found of some is carried on to the next."""
    first_token = int(lens.query_start[request])
    tokens = int(lens.query_start[request + 1]) - first_token
    keys = int(lens.seq_lens[request])
    heads = min(sizes.heads, HEADS_TOGETHER)
    while heads > 1 and (sizes.carried_bytes(tokens, heads) > room // 2 or _rows(tokens, heads, sizes, room) < TILE):
        heads = ceil_div(heads, 2)
    rows = _rows(tokens, heads, sizes, room)
    for first in range(0, sizes.heads, heads):
        for begin in range(0, keys, rows):
            part = _Part(request, begin, min(keys, begin + rows), 0)
            yield _Pass([part], first, min(heads, sizes.heads - first), first_token, tokens)


def _rows(tokens: int, heads: int, sizes: LatentSizes, room: int) -> int:
    """Keys that there is room for beside what so many tokens carry: whole tiles."""
    return (room - sizes.carried_bytes(tokens, heads)) // sizes.bytes_for(1, heads) // TILE * TILE


def _tables(parts: Sequence[_Part], lens: BatchLens) -> tuple[_Ints, ...]:
    """As the fields of LatentPass come, from `pieces` to `ends_counter`."""
    nothing = np.zeros(1, np.int32)
    return _pieces(parts), _records(parts, lens), nothing, _records(parts, lens, ends_only=True), nothing


def _pieces(parts: Sequence[_Part]) -> _Ints:
    """[n, 4]: request, first position, count, row."""
    found = []
    for part in parts:
        begins = np.arange(part.begin, part.end, PIECE, dtype=np.int32)
        counts = np.minimum(part.end - begins, PIECE)
        found.append(np.stack([np.full_like(begins, part.request), begins, counts, begins - part.begin + part.base], 1))
    return np.concatenate(found)


def _records(parts: Sequence[_Part], lens: BatchLens, ends_only: bool = False) -> _Ints:
    """[tiles, RECORD]: see kernels/triton/mla_prompts.py. `ends_only`: those with the last tokens of requests."""
    found = []
    for part in parts:
        begin, end = (int(at) for at in lens.query_start[part.request : part.request + 2])
        tiles = np.arange(0, end - begin, TILE, dtype=np.int32)[-1 if ends_only else 0 :]
        counts = np.minimum(end - begin - tiles, TILE)
        positions = int(lens.seq_lens[part.request]) - (end - begin) + tiles
        keys = np.minimum(positions + counts, part.end) - part.begin
        same = [part.base, part.end - part.begin, int(part.begin > 0)]
        columns = [begin + tiles, counts, positions - part.begin, keys, *(np.full_like(tiles, value) for value in same)]
        found.append(np.stack([*columns, positions + counts > part.end], 1)[keys > 0])
    records = np.concatenate(found).astype(np.int32)
    return records[np.argsort(-records[:, 3], kind="stable")]


def _sent(arrays: Sequence[_Ints], device: torch.device) -> list[Tensor]:
    """As one copy; each begins at a multiple of 16 bytes."""
    sizes = [array.size for array in arrays]
    starts = np.cumsum([0, *(ceil_div(size, 4) * 4 for size in sizes)])
    packed = np.zeros(int(starts[-1]), np.int32)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.size] = array.reshape(-1)
    host = torch.from_numpy(packed)
    sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    return [sent[start : start + size] for start, size in zip(starts.tolist(), sizes, strict=False)]


class Workspace:
    """Where keys and values are made. Made with the planner, so that it is counted before the cache gets the rest."""

    def __init__(self, device: torch.device, num_bytes: int = WORKSPACE_BYTES) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.zeros(num_bytes + _SLACK, dtype=torch.uint8, device=device)

    def parts(self, step: LatentPass, sizes: LatentSizes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """rows [S, kept] and expanded [S, heads, expanded] of this type; sums [Q, heads, value] and totals [Q, heads,
        2], float32, of what is carried."""
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (torch.float32, (step.num_carried, step.heads, sizes.value)),
            (torch.float32, (step.num_carried, step.heads, 2)),
            (dtype, (step.num_rows, step.heads, sizes.expanded)),
            (dtype, (step.num_rows, sizes.kept)),
        ]
        found = []
        start = 0
        for kind, shape in shapes:
            count = int(np.prod(shape)) * kind.itemsize
            found.append(self._memory[start : start + count].view(kind).view(shape))
            start += ceil_div(count, 16) * 16
        sums, totals, expanded, rows = found
        return rows, expanded, sums, totals


def attend(
    output: Tensor, query: Tensor, kv_cache: Tensor, block_table: Tensor, scale: float, weights: LatentWeights,
    prompts: LatentPrompts, workspace: Workspace, ends_only: bool = False,
) -> None:  # fmt: skip
    """output [T, H, value], query [T, H, turned + plain]; kv_cache [num_blocks, block_size, turned + latent], which has
    this step's vectors. `ends_only`: of the tiles with last tokens alone."""
    from pagemill.model.kernels.triton import launch, mla_prompts  # deferred: triton

    sizes = sizes_of(weights, kv_cache)
    kernel = mla_prompts.attend
    if is_hopper(query.device):
        from pagemill.model.kernels.triton import mla_prompts_hopper  # deferred: Gluon

        if mla_prompts_hopper.takes(query, (query.shape[2] - weights.sizes[0], *weights.sizes)):
            kernel = mla_prompts_hopper.attend
    for step in prompts.passes(sizes):
        rows, expanded, sums, totals = workspace.parts(step, sizes, query.dtype)
        mla_prompts.gather(rows, kv_cache, block_table, step.pieces)
        weights.make(rows, expanded, step.first_head)
        tiles = mla_prompts.Tiles(*(step.ends, step.ends_counter) if ends_only else (step.records, step.counter))
        carried = mla_prompts.Carried(sums, totals, step.carried_token)
        carries = step.num_carried > 0
        # What long requests run is compiled with the rest, ahead of them.
        for either in (carries,) if launch.launches() else (False, True):
            kernel(output, query, rows, expanded, tiles, scale, step.first_head, carried if either else None)


def sizes_of(weights: LatentWeights, kv_cache: Tensor) -> LatentSizes:
    """Of a layer with this cache."""
    return LatentSizes(weights.num_heads, kv_cache.shape[2], sum(weights.sizes), weights.sizes[1], kv_cache.itemsize)
