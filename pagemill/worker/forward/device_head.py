"""`DeviceHead`: steps of a head on a device, for few tokens of a request: a guess is two graphs, one that computes what
the step before has computed in the model, one that goes on token after token.

Knows shapes and where tensors lie; which rows there are, the proposer knows.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill.config.graph_mode import GraphMode
from pagemill.messages.step import Int32Array
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.layer import Attention
from pagemill.model.forward_context import BatchDescriptor, ForwardContext, current_forward, forward_context
from pagemill.model.kernels import batching
from pagemill.model.models.draft_head import DraftHead
from pagemill.platforms.interface import GraphMaker, Transfers
from pagemill.worker.batch.block_tables import BlockTables
from pagemill.worker.batch.buffers import UploadRing
from pagemill.worker.batch.device_tables import DeviceBlockTable
from pagemill.worker.batch.input_batch import InputBatch, Int64Array
from pagemill.worker.forward.device_batch import DeviceBatch
from pagemill.worker.forward.mixed_batch import BatchBounds, MixedShape, MixedTensors
from pagemill.worker.graphs.wrapper import GraphWrapper
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.spec_decode.hidden_states import HiddenStates

NOT_A_NUMBER = -1


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What the steps are made of."""

    head: DraftHead
    given: HiddenStates
    groups: AttentionGroups
    """Of the head's layers."""
    tables: BlockTables
    transfers: Transfers
    maker: GraphMaker | None
    """None where nothing is captured."""


class DeviceHead:
    """Up to `max_requests` requests of at most 1 + `max_drafts` tokens, padded to powers of two of them."""

    def __init__(
        self, parts: HeadParts, num_slots: int, max_requests: int, max_drafts: int, device: torch.device
    ) -> None:
        tables = tuple(table for table in parts.tables.groups if isinstance(table, DeviceBlockTable))
        self._head = parts.head
        self._given = parts.given
        self._groups = parts.groups
        self._max_drafts = max_drafts
        self._length = 1 + max_drafts
        self._pad_slot = num_slots
        count = 1 << (max_requests - 1).bit_length()
        self.max_requests = count
        self._batch = DeviceBatch(count * self._length, count, tables, device)
        self._uploads = UploadRing(parts.transfers, device, 8 * count * self._length)
        self._source = torch.zeros(count * self._length, dtype=torch.int32, device=device)
        """[T] the rows of the model's hidden states."""
        self._rows = torch.zeros(count, dtype=torch.int32, device=device)
        """[R] the rows of `hidden` from which guesses go on."""
        self._last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.hidden = torch.zeros((count, parts.head.hidden_size), dtype=parts.head.dtype, device=device)
        """[R, E] after the last tokens of requests."""
        self._drafts = torch.zeros((count, max_drafts), dtype=torch.int32, device=device)
        self._planned: dict[str, Any] = {}
        self._captures = parts.maker is not None
        self._follow: Any = self._follow_step
        self._guess: Any = self._guess_step
        if parts.maker is not None:
            self._follow = GraphWrapper(self._follow_step, GraphMode.FULL, parts.maker)
            self._guess = GraphWrapper(self._guess_step, GraphMode.FULL, parts.maker)
        self._ready: set[int] = set()
        """Numbers of requests for which there are graphs."""

    @torch.inference_mode()
    def capture_at_start(self) -> None:
        """Capture all sizes; no request has a slot."""
        count = 1
        while self._captures and count <= self.max_requests:
            for mode in (GraphMode.NONE, GraphMode.FULL):  # what is compiled at its first launch, is so before
                shape = MixedShape(count * self._length, count)
                padding = shape.padding(self._pad_slot, self._batch.max_seq_len)
                self._run_follow(padding, np.zeros(shape.num_tokens, np.int64), count, mode)
                self._run_guess(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32), count, mode)
            self._ready.add(count)
            count *= 2

    def fits(self, batch: InputBatch) -> bool:
        """Whether `follow` takes a batch."""
        return len(batch.slots) <= self.max_requests and batch.max_query_len <= self._length

    @torch.inference_mode()
    def follow(self, batch: InputBatch, source: Int64Array) -> Tensor:
        """A batch of the head, [T] rows of the model's hidden states -> `hidden`, its first L rows the sampled ones."""
        count = self._padded(len(batch.slots))
        self._run_follow(batch, source, count, self._mode(count))
        return self.hidden

    @torch.inference_mode()
    def guess(self, slots: Int32Array, rows: Int32Array, starts: Int32Array) -> Int32Array:
        """[L] slots, their rows of `hidden`, and the positions of their first guesses in the head -> [L, drafts],
        NOT_A_NUMBER from where nothing can be made of logits. Blocks hold all of their positions."""
        count = self._padded(len(slots))
        self._run_guess(slots, rows, starts, count, self._mode(count))
        found: Int32Array = self._drafts[: len(slots)].cpu().numpy()
        return found

    def place(self, hidden: Tensor) -> Tensor:
        """[L, E] of another step, for `guess`: `hidden`, or the same where there is no room."""
        if len(hidden) > self.max_requests:
            return hidden
        self.hidden[: len(hidden)].copy_(hidden)
        return self.hidden

    def _padded(self, count: int) -> int:
        return 1 << (count - 1).bit_length()

    def _mode(self, count: int) -> GraphMode:
        return GraphMode.FULL if count in self._ready else GraphMode.NONE

    def _run_follow(self, batch: InputBatch, source: Int64Array, count: int, mode: GraphMode) -> None:
        shape = MixedShape(count * self._length, count)
        packed = shape.pack(batch, np.ones(len(batch.slots), np.bool_), self._pad_slot)
        sent, rows = self._uploads.send([packed, source.astype(np.int32)])
        memory = self._batch.mixed[: len(sent)].copy_(sent)
        self._source[: len(rows)].copy_(rows)
        self._uploads.uploads_consumed()
        key = BatchDescriptor(shape.num_tokens, count, True)
        with forward_context(ForwardContext(self._planned, mode, key)):
            self._follow(shape.tensors(memory), shape.verification(self._length))

    def _follow_step(self, tensors: MixedTensors, bounds: BatchBounds) -> None:
        """What a graph holds; it reads `_source` and the packed batch."""
        batch = self._batch
        tokens, positions = batch.place_tokens(tensors, self._last_tokens, self._groups.indices)
        self._planned.update(self._groups.plan_with(partial(batch.mixed_common, tensors, bounds)))
        given = self._given.layers if self._given.wanted.layers else self._given.final
        fused = self._head.fused(given.index_select(0, self._source[: len(tokens)]))
        found = self._head.step(tokens, fused, positions, tensors.logits_index)
        self.hidden[: len(found)].copy_(found)

    def _run_guess(self, slots: Int32Array, rows: Int32Array, starts: Int32Array, count: int, mode: GraphMode) -> None:
        packed = np.zeros((3, count), np.int32)
        packed[0] = self._pad_slot
        for place, values in enumerate((slots, rows, starts)):
            packed[place, : len(values)] = values
        (sent,) = self._uploads.send([packed])
        for target, values in zip((self._batch.slots, self._rows, self._batch.next_positions), sent, strict=True):
            target[:count].copy_(values)
        self._uploads.uploads_consumed()
        with forward_context(ForwardContext(self._planned, mode, BatchDescriptor(count, count, True))):
            self._guess(count)

    def _guess_step(self, count: int) -> None:
        """What a graph holds; it reads buffers of `_batch`, `_rows` and `hidden`."""
        batch = self._batch
        slots = batch.slots[:count]
        positions = batch.positions[:count]
        token_ids = batch.token_ids[:count]
        hidden = self.hidden.index_select(0, self._rows[:count])
        replayed = current_forward().graph_mode is GraphMode.FULL
        for place in range(self._max_drafts):
            if place:
                batching.begin_decode(
                    slots,
                    batch.next_positions[:count],
                    self._last_tokens,
                    token_ids,
                    positions,
                    batch.seq_lens[:count],
                    [batch.table_rows(group, count) for group in self._groups.indices],
                )
                self._planned.update(self._groups.plan_with(partial(batch.decode_common, replayed, count)))
                hidden = self._head.step(token_ids, hidden, positions)
            tokens, logits = self._head.best(hidden)
            self._last_tokens.index_copy_(0, slots.long(), tokens)
            self._drafts[:count, place].copy_(tokens.masked_fill(logits.isnan(), NOT_A_NUMBER))


def makes_head_graphs(head: DraftHead, groups: AttentionGroups) -> bool:
    """Whether attention of a head may be part of a graph, of any lengths, and nothing is planned on the host."""
    layers = [layer for layer in head.cache_layers().values() if isinstance(layer, Attention)]
    supports = {layer.backend.metadata_builder.graph_support for layer in layers}
    return supports == {AttentionCGSupport.ALWAYS} and not groups.plans_on_host
