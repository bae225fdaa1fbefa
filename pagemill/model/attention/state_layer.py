"""`StateLayer`: what layers share that keep a state per request (Mamba, linear attention), and how a step is cut.

Knows nothing about what the state means; a subclass computes with it.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from pagemill.errors import PagemillError
from pagemill.messages.kv_spec import KVCacheSpec, MambaSpec
from pagemill.model.attention.interface import CommonAttentionMetadata, StepPlanner
from pagemill.model.forward_context import current_forward

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Run:
    """What one request has of a step, where that is more than one token."""

    begin: int
    end: int
    """Rows of the batch."""
    segment: int
    """The first of its segments."""
    ends: tuple[int, ...]
    """Where each of its segments ends, counted from `begin`."""


@dataclass(frozen=True, slots=True)
class Singles:
    """Requests that have one token in a step."""

    segments: Tensor
    """[N] int64."""
    rows: Tensor
    """[N] int64, of the batch."""


@dataclass(frozen=True, slots=True)
class Trials:
    """N requests that verify drafts, those with most of them first: of each, the last token that is no draft, and the
    drafts after it, n tokens at most. Which of their states are kept is known when they are verified."""

    requests: Tensor
    """[N] int64 on the host: which of the batch."""
    rows: Tensor
    """[N] int64: the batch's row of the first of those tokens."""
    num_alive: tuple[int, ...]
    """[n] requests that have a token at each place."""
    source: Tensor
    """[N] int64, block with the state before the first of them."""
    fresh: Tensor
    """[N] bool, whether there is none."""
    target: Tensor
    """[N, n] int64, block of each token."""
    last: Tensor
    """[N, n] bool, whether it is the last one of its block."""


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """A step as a layer with states sees it: the tokens of each request, cut where a block ends. S segments.

    The state of `source` is read (zeros where `fresh`), the segment's tokens are applied, and the result is written
    to `target`. A request's segments follow each other, the next one's source being the target before. What another
    request reads is never written in the same step. Tensors are on the device of the layers.
    """

    start: Tensor
    """[S + 1] int64, exclusive prefix sum of the tokens per segment."""
    source: Tensor
    """[S] int64, block with the state before the segment."""
    fresh: Tensor
    """[S] bool, whether the segment begins its request: there is no state before it."""
    target: Tensor
    """[S] int64, block for the state after the segment."""
    singles: Singles
    runs: tuple[Run, ...]
    """The other requests, in the order of the batch."""
    trials: Trials | None = None
    """Requests that verify drafts; their tokens before these are in `singles` or `runs`, and come first."""


class StatePlanner:
    """Cuts a step, once for all layers of a group. Asks a device for the lengths where the host was not told them."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device

    def build(self, common: CommonAttentionMetadata) -> StateMetadata:
        """Segments in the order of the batch; requests of the padding have none."""
        size = common.block_size
        query_start = common.query_start if common.query_start_host is None else common.query_start_host
        query_start = query_start.cpu().long()
        counts = query_start[1:] - query_start[:-1]
        ends = (common.seq_lens if common.seq_lens_host is None else common.seq_lens_host).cpu().long()
        trials = None
        if common.num_drafts_host is not None and common.num_drafts_host.any():
            tried = torch.where(common.num_drafts_host > 0, common.num_drafts_host + 1, 0)
            trials = self._trials(common, query_start, ends, tried)
            counts = counts - tried
            ends = ends - tried
        here = ((counts > 0) & (ends > 0)).nonzero().squeeze(1)
        counts = counts[here]
        ends = ends[here]
        begins = ends - counts
        first_block = begins // size
        last_block = (ends - 1) // size
        num_segments = last_block - first_block + 1
        requests = torch.repeat_interleave(torch.arange(len(counts)), num_segments)
        before = num_segments.cumsum(0) - num_segments
        block = first_block[requests] + torch.arange(len(requests)) - before[requests]
        segment_begin = torch.maximum(block * size, begins[requests])
        segment_end = torch.minimum((block + 1) * size, ends[requests])
        start = torch.zeros(len(requests) + 1, dtype=torch.int64)
        torch.cumsum(segment_end - segment_begin, 0, out=start[1:])
        table = common.block_table.long()
        rows = here[requests].to(self._device)
        source = table[rows, ((segment_begin - 1).clamp(min=0) // size).to(self._device)]
        target = table[rows, block.to(self._device)]
        single = (counts == 1).nonzero().squeeze(1)
        singles = Singles(before[single].to(self._device), query_start[here[single]].to(self._device))
        runs = _runs(query_start[here], counts, before, num_segments, start)
        return StateMetadata(start, source, (segment_begin == 0).to(self._device), target, singles, runs, trials)

    def _trials(self, common: CommonAttentionMetadata, query_start: Tensor, ends: Tensor, tried: Tensor) -> Trials:
        """`tried`: [R] of the tokens of each request, how many are tried at the end; `ends`: [R] the tokens of each."""
        size = common.block_size
        requests = tried.argsort(descending=True, stable=True)[: int((tried > 0).sum())]
        counts = tried[requests]
        begins = ends[requests] - counts
        places = torch.arange(int(counts[0]))
        positions = begins.unsqueeze(1) + places
        table = common.block_table.long()
        blocks = torch.minimum(positions, ends[requests].unsqueeze(1) - 1) // size
        return Trials(
            requests,
            (query_start[1:][requests] - counts).to(self._device),
            tuple((counts.unsqueeze(1) > places).sum(0).tolist()),
            table[requests.to(self._device), ((begins - 1).clamp(min=0) // size).to(self._device)],
            (begins == 0).to(self._device),
            table[requests.to(self._device).unsqueeze(1), blocks.to(self._device)],
            ((positions + 1) % size == 0).to(self._device),
        )


def _runs(
    begins: Tensor, counts: Tensor, first_segment: Tensor, num_segments: Tensor, start: Tensor
) -> tuple[Run, ...]:
    runs = []
    for row in (counts != 1).nonzero().squeeze(1).tolist():
        begin, count, first, number = (int(part[row]) for part in (begins, counts, first_segment, num_segments))
        ends = (start[first + 1 : first + 1 + number] - start[first]).tolist()
        runs.append(Run(begin, begin + count, first, tuple(ends)))
    return tuple(runs)


class StateLayer(nn.Module):
    """`shapes` and `dtypes` (names of torch dtypes) of the states that the layer keeps of one request."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], *, name: str) -> None:
        super().__init__()
        self.name = name
        self.shapes, self.dtypes = tuple(shapes), tuple(dtypes)
        self._states: tuple[Tensor, ...] = ()

    @property
    def states(self) -> tuple[Tensor, ...]:
        """[num_blocks, *shape] of each state, by block. Raises PagemillError before there is memory."""
        if not self._states:
            raise PagemillError(f"{self.name} has no memory for its states yet")
        return self._states

    def kv_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """The layer's states; their types are its own."""
        return MambaSpec(block_size, self.shapes, self.dtypes)

    def bind(self, memory: Tensor, num_blocks: int, spec: KVCacheSpec) -> None:
        """Take the layer's memory: [num_blocks * page_bytes] uint8, block after block."""
        pages = memory.view(num_blocks, -1)
        offsets = cast(MambaSpec, spec).offsets()
        states = []
        for offset, shape, dtype in zip(offsets, self.shapes, self.dtypes, strict=True):
            kind: torch.dtype = getattr(torch, dtype)
            num_bytes = math.prod(shape) * kind.itemsize
            states.append(pages[:, offset : offset + num_bytes].view(kind).view(num_blocks, *shape))
        self._states = tuple(states)

    def planning(self) -> Hashable:
        """All layers with states are planned alike."""
        return StatePlanner

    def planner(self, device: torch.device) -> StepPlanner:
        """Cuts the step at the ends of blocks."""
        return StatePlanner(device)

    def metadata(self) -> StateMetadata:
        """The plan of the running step."""
        found: StateMetadata = current_forward().attention[self.name]
        return found

    def keep(self, num_kept: Tensor) -> None:
        """The step's drafts are verified: leave in the blocks the states after the tokens that stay. [R] int64 on the
        host: of the tokens that each request of the batch tried, how many do; 1 at least, where it tried any."""
        raise TypeError(f"{type(self).__name__} does not say what it keeps")
