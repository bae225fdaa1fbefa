"""Any batch as one array of int32: padded to a shape on the host, taken apart on the device. Knows no request.

T tokens and R requests, padding included. Tokens of the padding belong to the slot of padding, and to no request;
requests of the padding have no tokens, and the rows from which nothing is sampled come last.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagemill.messages.step import Int32Array
from pagemill.model.attention.interface import BatchLens
from pagemill.model.kernels.batching_reference import NO_DRAFT, SlotTokens
from pagemill.utils.math import ceil_div
from pagemill.worker.batch.input_batch import InputBatch

_ALIGNMENT = 4
"""Elements to whose multiple each part is padded, so that kernels may read 16 bytes at once."""
QUERY_START = 5
"""The part that is."""


@dataclass(frozen=True, slots=True)
class MixedTensors:
    """A batch on the device; int32."""

    tokens: SlotTokens
    slots: Tensor
    """[R]."""
    query_start: Tensor
    """[R + 1]."""
    seq_lens: Tensor
    """[R]."""
    logits_index: Tensor
    """[L] the row of the hidden states from which a token is sampled; L = R where nobody verifies drafts."""
    sampled_slots: Tensor
    """[L] the slot that gets it."""
    sampled_positions: Tensor
    """[L] its position in the slot's request."""
    drafts: "DraftTensors | None" = None

    def first(self, num_rows: int, num_slots: int) -> "MixedTensors":
        """Without what is padding of the rows and of the slots that sample."""
        drafts = self.drafts
        if drafts is not None:
            drafts = DraftTensors(drafts.slots[:num_slots], drafts.first_rows[:num_slots], drafts.ids[:num_rows])
        slots, positions = self.sampled_slots[:num_rows], self.sampled_positions[:num_rows]
        return replace(self, sampled_slots=slots, sampled_positions=positions, drafts=drafts)


class DraftTensors(NamedTuple):
    """What a batch verifies; int32."""

    slots: Tensor
    """[R] those that sample, each once."""
    first_rows: Tensor
    """[R] of the L rows, the first of each."""
    ids: Tensor
    """[L] the draft that follows each row; NO_DRAFT in a slot's last."""


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """What the host says of a batch's lengths; for a graph, of all that it may be replayed for."""

    num_tokens: int
    min_query_len: int
    """0: anything."""
    max_query_len: int
    max_seq_len: int | None
    """None: as long as there may be."""
    shared: tuple[int, ...] = ()
    """Tokens that all requests share, of each KV group, where attention makes use of it."""
    decode_len: int = 1
    """As in `CommonAttentionMetadata`."""
    lens: BatchLens | None = field(default=None, compare=False)
    """Of this batch alone."""
    asks_for_ends: bool = False
    """As in `CommonAttentionMetadata`."""

    @classmethod
    def of(cls, batch: InputBatch, shared: tuple[int, ...] = ()) -> "BatchBounds":
        """Of this batch alone."""
        lengths = np.diff(batch.query_start)
        lasts = batch.query_start[1:] - 1
        asked = lasts[np.searchsorted(lasts[:-1], batch.logits_index)]
        lens = BatchLens(batch.query_start, batch.seq_lens)
        return cls(
            batch.num_tokens,
            int(lengths.min()),
            int(lengths.max()),
            batch.max_seq_len,
            shared,
            lens=lens,
            asks_for_ends=bool((asked == batch.logits_index).all()),
        )

    def verifying(self, decode_len: int) -> "BatchBounds":
        """`decode_len`: where all requests go on and verify drafts; 0: they do not all."""
        return replace(self, decode_len=decode_len or 1, asks_for_ends=False)


class MixedShape(NamedTuple):
    """Sizes of a padded batch."""

    num_tokens: int
    num_requests: int
    num_rows: int = 0
    """That are sampled from, where drafts are verified; 0: none are, and there are as many as requests."""

    @property
    def bounds(self) -> BatchBounds:
        """Of every batch that is padded to it. One request has more than one token: with one it would decode."""
        alone = self.num_requests == 1 and self.num_tokens > 1
        return BatchBounds(self.num_tokens, 2 if alone else 0, self.num_tokens, None)

    def verification(self, decode_len: int) -> BatchBounds:
        """Of every batch that is padded to it, where all requests go on and verify drafts."""
        return BatchBounds(self.num_tokens, 0, decode_len, None, decode_len=decode_len)

    @property
    def num_elements(self) -> int:
        """How many elements the array has."""
        return _size_of(self)

    def pack(self, batch: InputBatch, known: npt.NDArray[np.bool_], pad_slot: int) -> Int32Array:
        """`known` [requests of the batch]: whether the host knows their tokens."""
        packed = np.zeros(self.num_elements, np.int32)
        for place, (values, padding) in zip(places_of(self), _parts(batch, known, pad_slot), strict=False):
            packed[place.start : place.start + len(values)] = values
            if padding:
                packed[place.start + len(values) : place.stop] = padding
        return packed

    def pack_drafts(self, batch: InputBatch, pad_slot: int) -> Int32Array:
        """As `pack`, of a batch whose tokens the host knows, and what it verifies."""
        packed = _padded(self, pad_slot).copy()
        values = (
            batch.token_slots,
            None,
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.query_start,
            batch.seq_lens,
            batch.logits_index,
            batch.sampled_slots,
            batch.sampled_positions,
            *draft_rows(batch),
        )
        places = places_of(self)
        for place, part in zip(places, values, strict=True):
            if part is not None:
                packed[place.start : place.start + len(part)] = part
        requests, starts = len(batch.slots), places[QUERY_START]
        packed[starts.start + requests + 1 : starts.stop] = batch.num_tokens
        return packed

    def tensors(self, packed: Tensor) -> MixedTensors:
        """The parts of what was packed: views."""
        slots, known, given, positions, *rest = (packed[place] for place in places_of(self))
        requests, query_start, seq_lens, logits_index, sampled_slots, sampled_positions, *drafts = rest
        return MixedTensors(
            SlotTokens(slots, known, given, positions),
            requests,
            query_start,
            seq_lens,
            logits_index,
            sampled_slots,
            sampled_positions,
            DraftTensors(*drafts) if drafts else None,
        )

    def padding(self, pad_slot: int, longest: int) -> InputBatch:
        """A batch of padding alone, which does as much work: requests of at most `longest` tokens in the slot of
        padding."""
        lengths: list[int] = []
        for waiting in range(self.num_requests, 0, -1):
            lengths.append(min(longest, ceil_div(self.num_tokens - sum(lengths), waiting)))
        query_start = np.fromiter(accumulate(lengths, initial=0), np.int32, len(lengths) + 1)
        count = int(query_start[-1])
        slots = np.full(self.num_requests, pad_slot, np.int32)
        zeros = np.zeros(count, np.int64)
        return InputBatch(
            step_id=-1,
            slots=slots,
            token_slots=np.full(count, pad_slot, np.int32),
            token_ids=zeros,
            positions=zeros,
            query_start=query_start,
            seq_lens=np.array(lengths, np.int32),
            logits_index=(query_start[1:] - 1).astype(np.int64),
            sampled_slots=slots,
            sampled_positions=zeros[: self.num_requests],
        )

    def sizes(self) -> tuple[int, ...]:
        """Of the parts, in their order."""
        tokens, requests, rows = self
        drafts = (requests, requests, rows) if rows else ()
        rows = rows or requests
        return (tokens,) * 4 + (requests, requests + 1, requests, rows, rows, rows) + drafts


@lru_cache(maxsize=1024)
def places_of(shape: MixedShape) -> tuple[slice, ...]:
    """Where the parts of a shape lie. Kept for the shapes of graphs, which come again and again."""
    starts = accumulate((ceil_div(size, _ALIGNMENT) * _ALIGNMENT for size in shape.sizes()), initial=0)
    return tuple(slice(start, start + size) for start, size in zip(starts, shape.sizes(), strict=False))


@lru_cache(maxsize=1024)
def _size_of(shape: MixedShape) -> int:
    """Elements of its array."""
    return sum(ceil_div(size, _ALIGNMENT) * _ALIGNMENT for size in shape.sizes())


@lru_cache(maxsize=64)
def _padded(shape: MixedShape, pad_slot: int) -> Int32Array:
    """A batch of drafts with nothing in it; its tokens are known."""
    packed = np.zeros(shape.num_elements, np.int32)
    token_slots, known, _, _, slots, _, _, _, sampled_slots, _, draft_slots, _, ids = places_of(shape)
    for place in (token_slots, slots, sampled_slots, draft_slots):
        packed[place] = pad_slot
    packed[known] = 1
    packed[ids] = NO_DRAFT
    return packed


class DraftRows(NamedTuple):
    """What a batch verifies, as the host knows it; see `DraftTensors`."""

    slots: Int32Array
    first_rows: npt.NDArray[np.integer]
    ids: npt.NDArray[np.int64]


def draft_rows(batch: InputBatch) -> DraftRows:
    """Of L rows, at least one."""
    rows = batch.slot_rows
    # The token behind a row's own is its draft.
    ids = np.empty_like(batch.token_ids, shape=len(batch.sampled_slots))
    if len(ids) == batch.num_tokens:
        ids[:-1] = batch.token_ids[1:]
    else:
        ids[:] = batch.token_ids[np.minimum(batch.logits_index + 1, batch.num_tokens - 1)]
    ids[rows.starts + rows.counts - 1] = NO_DRAFT
    return DraftRows(rows.slots, rows.starts, ids)


def _parts(
    batch: InputBatch, known: npt.NDArray[np.bool_], pad_slot: int
) -> tuple[tuple[npt.NDArray[np.generic], int], ...]:
    """(values, what fills up the rest), in the order of `MixedShape.sizes`."""
    return (
        (batch.token_slots, pad_slot),
        (np.repeat(known, np.diff(batch.query_start)), 1),
        (batch.token_ids, 0),
        (batch.positions, 0),
        (batch.slots, pad_slot),
        (batch.query_start, batch.num_tokens),
        (batch.seq_lens, 0),
        (batch.logits_index, batch.num_tokens - 1),  # a row that is computed, whatever else is not
        (batch.sampled_slots, pad_slot),
        (batch.sampled_positions, 0),
    )
