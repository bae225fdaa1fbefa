"""`GuessGraphs`: guesses of a network on a device, in graphs; `FollowingGraphs`: also what it computes of a step that
the model has computed, for few tokens of a request.

Know shapes and where tensors lie; which rows there are, the proposer knows, and what is computed, a subclass.
"""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pagemill.config.graph_mode import GraphMode
from pagemill.messages.step import Int32Array
from pagemill.model.forward_context import BatchDescriptor, ForwardContext, forward_context
from pagemill.model.kernels.batching_reference import SlotTokens
from pagemill.platforms.interface import GraphMaker, Transfers
from pagemill.worker.batch.buffers import UploadRing
from pagemill.worker.batch.device_states import DeviceStates
from pagemill.worker.batch.device_tables import DeviceBlockTable
from pagemill.worker.batch.input_batch import InputBatch, Int64Array
from pagemill.worker.forward.device_batch import DeviceBatch
from pagemill.worker.forward.mixed_batch import BatchBounds, MixedShape, MixedTensors
from pagemill.worker.graphs.wrapper import GraphWrapper
from pagemill.worker.spec_decode.chain import rooms
from pagemill.worker.spec_decode.hidden_states import HiddenStates
from pagemill.worker.spec_decode.interface import DraftNetwork, FollowSteps, GuessSteps

NOT_A_NUMBER = -1


@dataclass(frozen=True, slots=True)
class GuessParts:
    """What the steps are made of."""

    network: DraftNetwork
    given: HiddenStates | None
    """What the network reads of the model; None: nothing."""
    transfers: Transfers
    maker: GraphMaker | None
    """None where nothing is captured."""
    num_slots: int
    max_requests: int
    max_drafts: int


class Asked:
    """Of [R] requests, padding included: views of what was sent; int32."""

    def __init__(self, packed: Tensor, count: int) -> None:
        self.slots, self.rows, self.starts, self.tokens = packed[: 4 * count].view(4, count)

    def __len__(self) -> int:
        return len(self.slots)


class GuessGraphs(GuessSteps):
    """Requests are padded to powers of two of them, but behind steps that verify drafts (`go_on`)."""

    shift: ClassVar[int] = 0
    """How many positions behind the token from which the model has sampled it the network computes a token."""

    def __init__(self, parts: GuessParts) -> None:
        count = 1 << (parts.max_requests - 1).bit_length()
        device = parts.network.device
        self.max_requests = count
        self.num_graphs = 0 if parts.maker is None else count.bit_length()
        self._network = parts.network
        self._max_drafts = parts.max_drafts
        self._pad_slot = parts.num_slots
        self._maker = parts.maker
        self._uploads = UploadRing(parts.transfers, device, 4 * count)
        self._packed = torch.zeros(4 * count, dtype=torch.int32, device=device)
        self._sizes = [1 << power for power in range(count.bit_length())]
        self._reach = 0
        """How far behind the tokens that the model may have computed by then a guess writes to blocks."""
        self.drafts = torch.zeros((count, parts.max_drafts), dtype=torch.int32, device=device)
        """[R, drafts] of the guess that ran last."""
        self._planned: dict[str, Any] = {}
        self._guess = self._wrap(self._guess_step)
        self._ready: set[int] = set()
        """Numbers of requests for which there are graphs."""

    @torch.inference_mode()
    def capture_at_start(self) -> None:
        if self._maker is None:
            return
        for count in self._sizes:
            for mode in (GraphMode.NONE, GraphMode.FULL):  # what is compiled at its first launch, is so before
                self._run_padding(count, mode)
            self._ready.add(count)

    @torch.inference_mode()
    def guess(
        self,
        slots: Int32Array,
        rows: Int32Array | None = None,
        starts: Int32Array | None = None,
        tokens: Int32Array | None = None,
    ) -> Int32Array:
        count = 1 << (len(slots) - 1).bit_length()
        packed = np.zeros((4, count), np.int32)
        packed[0] = self._pad_slot
        for place, values in enumerate((slots, rows, starts, tokens)):
            if values is not None:
                packed[place, : len(slots)] = values
        self._run_guess(packed, count, self._mode(count))
        found: Int32Array = self.drafts[: len(slots)].cpu().numpy()
        return found

    def has_room(self, slots: Int32Array, ends: Int32Array) -> bool:
        return bool((rooms(self._network, slots) >= ends + self._reach).all())

    def goes_on(self, shape: MixedShape) -> bool:
        """Whether `go_on` takes a step of such a shape."""
        return shape.num_requests <= self.max_requests

    def context(self, mode: GraphMode, key: BatchDescriptor) -> AbstractContextManager[object]:
        """In which `go_on` runs."""
        self._planned.clear()
        return forward_context(ForwardContext(self._planned, mode, key))

    def go_on(self, states: DeviceStates, tensors: MixedTensors, bounds: BatchBounds) -> None:
        """Behind a step in which all of [R] requests verify drafts, and whose results `states` have: compute what it
        has computed, and guess. Rows of drafts that were wrong are computed too: other tokens take their places."""
        drafts = tensors.drafts
        if drafts is None:
            raise RuntimeError("the batch was packed without drafts")
        num_rows, count = len(drafts.ids), len(drafts.slots)
        turns = len(states.results)
        found = states.results.index_select(0, (states.turn + (turns - 1)) % turns)[0]
        sampled = found[:num_rows].clamp(min=0)
        ends = (drafts.first_rows + found[num_rows : num_rows + count] - 1).clamp(0, num_rows - 1)
        starts = tensors.tokens.positions.index_select(0, ends) + (1 + self.shift)
        asked = Asked(self._packed, count)
        asked.slots.copy_(drafts.slots)
        asked.rows.copy_(ends)
        asked.starts.copy_(starts.masked_fill(drafts.slots == self._pad_slot, 0))
        asked.tokens.copy_(sampled.index_select(0, ends))
        self._follow_on(tensors, bounds, sampled, asked)
        self._guess_step(asked)

    def _follow_on(self, tensors: MixedTensors, bounds: BatchBounds, sampled: Tensor, asked: Asked) -> None:
        """Compute what a step has computed which sampled [L] tokens; `asked` has the rows that guesses go on from."""

    @abstractmethod
    def _guess_step(self, asked: Asked) -> None:
        """What a graph holds: from `asked` to `drafts`."""

    def _wrap(self, step: Any) -> Any:
        return step if self._maker is None else GraphWrapper(step, GraphMode.FULL, self._maker)

    def _mode(self, count: int) -> GraphMode:
        return GraphMode.FULL if count in self._ready else GraphMode.NONE

    def _run_guess(self, packed: Int32Array, count: int, mode: GraphMode) -> None:
        (sent,) = self._uploads.send([packed.reshape(-1)])
        self._packed[: 4 * count].copy_(sent)
        self._uploads.uploads_consumed()
        self._planned.clear()
        with forward_context(ForwardContext(self._planned, mode, BatchDescriptor(count, count, True))):
            self._guess(Asked(self._packed, count))

    def _run_padding(self, count: int, mode: GraphMode) -> None:
        """Steps of padding alone."""
        packed = np.zeros((4, count), np.int32)
        packed[0] = self._pad_slot
        self._run_guess(packed, count, mode)

    def _keep_drafts(self, tokens: Tensor, logits: Tensor, first: int = 0) -> None:
        """[R, N] tokens and their logits: drafts from the `first` on."""
        found = tokens.masked_fill(logits.isnan(), NOT_A_NUMBER)
        self.drafts[: len(tokens), first : first + found.shape[1]].copy_(found)


class FollowingGraphs(GuessGraphs, FollowSteps):
    """Up to 1 + most drafts tokens of each request are computed at once."""

    def __init__(self, parts: GuessParts) -> None:
        super().__init__(parts)
        self.num_graphs *= 2
        network = parts.network
        device = network.device
        count = self.max_requests
        tables = tuple(table for table in network.tables.groups if isinstance(table, DeviceBlockTable))
        self._groups = network.groups
        self._length = 1 + parts.max_drafts
        self._batch = DeviceBatch(count * self._length, count, tables, device)
        self._last_tokens = torch.zeros(parts.num_slots + 1, dtype=torch.int64, device=device)
        model = network.model
        self.hidden = torch.zeros((count, model.hidden_size), dtype=model.dtype, device=device)
        shapes = {size: MixedShape(size * self._length, size) for size in self._sizes}
        most = max(shape.num_elements + shape.num_tokens for shape in shapes.values())
        self._followed = torch.zeros(most, dtype=torch.int32, device=device)
        """A batch as `MixedShape` packs it, and of each token the row of the model's hidden states."""
        self._shapes = {size: (shape, shape.tensors(self._followed)) for size, shape in shapes.items()}
        self._follow = self._wrap(self._follow_step)
        self._reach = parts.max_drafts - 1 + self.shift

    def fits(self, batch: InputBatch) -> bool:
        return len(batch.slots) <= self.max_requests and batch.max_query_len <= self._length

    @torch.inference_mode()
    def follow(self, batch: InputBatch, source: Int64Array | None = None) -> Tensor:
        count = 1 << (len(batch.slots) - 1).bit_length()
        self._run_follow(batch, source, count, self._mode(count))
        return self.hidden

    def goes_on(self, shape: MixedShape) -> bool:
        return super().goes_on(shape) and shape.num_tokens <= self._batch.max_tokens

    def place(self, hidden: Tensor) -> Tensor:
        if len(hidden) > self.max_requests:
            return hidden
        self.hidden[: len(hidden)].copy_(hidden)
        return self.hidden

    @abstractmethod
    def _compute(self, tokens: Tensor, positions: Tensor, source: Tensor, rows: Tensor) -> Tensor | None:
        """[T] int64 tokens, their positions, and the rows of the model's hidden states -> [R, E] of these rows; None
        where there is no such thing."""

    def _run_follow(self, batch: InputBatch, source: Int64Array | None, count: int, mode: GraphMode) -> None:
        shape, tensors = self._shapes[count]
        packed = np.zeros(shape.num_elements + shape.num_tokens, np.int32)
        packed[: shape.num_elements] = shape.pack(batch, np.ones(len(batch.slots), np.bool_), self._pad_slot)
        if source is not None:
            packed[shape.num_elements : shape.num_elements + len(source)] = source
        (sent,) = self._uploads.send([packed])
        self._followed[: len(packed)].copy_(sent)
        self._uploads.uploads_consumed()
        self._planned.clear()
        with forward_context(ForwardContext(self._planned, mode, BatchDescriptor(shape.num_tokens, count, True))):
            self._follow(tensors, count)

    def _follow_step(self, tensors: MixedTensors, count: int) -> None:
        """What a graph holds; it reads `_followed`."""
        shape, _ = self._shapes[count]
        source = self._followed[shape.num_elements : shape.num_elements + shape.num_tokens]
        tokens, positions = self._plan(tensors, shape.verification(self._length))
        found = self._compute(tokens, positions, source, tensors.logits_index)
        if found is not None:
            self.hidden[:count].copy_(found)

    def _follow_on(self, tensors: MixedTensors, bounds: BatchBounds, sampled: Tensor, asked: Asked) -> None:
        placed = tensors.tokens
        tokens = SlotTokens(placed.slots, torch.ones_like(sampled), sampled, placed.positions + self.shift)
        moved = replace(tensors, tokens=tokens, seq_lens=tensors.seq_lens + self.shift)
        source = torch.arange(len(sampled), device=sampled.device)
        found = self._compute(*self._plan(moved, replace(bounds, lens=None)), source, asked.rows)
        if found is None:
            return
        self.hidden[: len(found)].copy_(found)
        asked.rows.copy_(source[: len(found)])

    def _run_padding(self, count: int, mode: GraphMode) -> None:
        shape, _ = self._shapes[count]
        padding = shape.padding(self._pad_slot, self._batch.max_seq_len)
        self._run_follow(padding, None, count, mode)
        super()._run_padding(count, mode)

    def _plan(self, tensors: MixedTensors, bounds: BatchBounds) -> tuple[Tensor, Tensor]:
        """[T] tokens and positions of a batch, of which the layers are told."""
        placed = self._batch.place_tokens(tensors, self._last_tokens, self._groups.indices)
        self._planned.update(self._groups.plan_with(partial(self._batch.mixed_common, tensors, bounds)))
        return placed

    def _alike(self, asked: Asked, given: Tensor) -> tuple[MixedTensors, BatchBounds]:
        """A batch in which each of [R] requests has N tokens, `given` [R, N] int32, from its start on."""
        count, length = given.shape
        device = given.device
        steps = torch.arange(length, dtype=torch.int32, device=device)
        slots = asked.slots.repeat_interleave(length)
        positions = (asked.starts.unsqueeze(1) + steps).view(-1)
        tokens = SlotTokens(slots, torch.ones_like(slots), given.reshape(-1), positions)
        query_start = torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device)
        ends = asked.starts + length
        tensors = MixedTensors(tokens, asked.slots, query_start, ends, query_start[1:] - 1, asked.slots, ends)
        return tensors, MixedShape(count * length, count).verification(length)
