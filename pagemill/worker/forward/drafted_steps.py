"""`DraftedSteps`: batches in which slots verify drafts, on a device. Shapes, graphs and how such batches end.

Knows how batches are queued by what it is given for that; nothing about decode steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagemill.config.graph_mode import GraphMode
from pagemill.messages.pending import Pending
from pagemill.messages.step import Int32Array
from pagemill.model.forward_context import BatchDescriptor
from pagemill.model.kernels import batching
from pagemill.platforms.interface import Transfers
from pagemill.worker.batch.device_states import DeviceStates
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.forward.device_batch import DeviceBatch
from pagemill.worker.forward.downloads import DraftedRows, GuessDownloads
from pagemill.worker.forward.guess_graphs import GuessGraphs
from pagemill.worker.forward.mixed_batch import BatchBounds, MixedShape, MixedTensors, places_of
from pagemill.worker.forward.step_graphs import CAPTURED_TAILS, StepGraphs, StepTail
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.sampling.device_sampler import sample_greedy, sample_random, sample_with_drafts
from pagemill.worker.sampling.draft_draws import DraftDraws
from pagemill.worker.sampling.sampler import Sampler
from pagemill.worker.spec_decode.interface import GuessSteps

BatchEnd = Callable[[Tensor, MixedTensors], None]
"""Samples from [L, V] logits of a batch, and keeps the tokens."""


class BatchQueue(Protocol):
    """What queues batches of any kind."""

    def upload(
        self,
        packed: Int32Array,
        shape: MixedShape,
        kept: bool = False,
        fill: tuple[Tensor, list[Int32Array]] | None = None,
    ) -> MixedTensors:
        """Bring a batch to the device. `kept`: the shape is a graph's, and comes again. `fill`: values on the device,
        and [N] each: places in what is packed, which values belong there, and what is added to them."""

    def queue(
        self,
        tensors: MixedTensors,
        bounds: BatchBounds,
        mode: GraphMode,
        key: BatchDescriptor,
        ends: Sequence[BatchEnd] = (),
    ) -> Tensor:
        """[L, V] logits, and what ends the batch in the same mode."""

    def queue_scored(
        self, batch: InputBatch, tensors: MixedTensors, bounds: BatchBounds, key: BatchDescriptor
    ) -> Tensor:
        """[L, V] logits of a batch with parts of prompts whose tokens are scored."""

    def end(
        self,
        logits: Tensor,
        batch: InputBatch,
        slots: Tensor,
        positions: Tensor,
        store: Callable[[Tensor, Tensor], None],
        drafts: Tensor | None = None,
    ) -> None:
        """Sample from logits that processors change first; `store` keeps the tokens. `drafts`: see `sample_rows`."""


@dataclass(frozen=True, slots=True)
class DraftedParts:
    """What these steps share with all others."""

    batch: DeviceBatch
    slots: DeviceStates
    graphs: StepGraphs
    groups: AttentionGroups
    sampler: Sampler


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A step in the shape of a graph."""

    tensors: MixedTensors
    bounds: BatchBounds
    key: BatchDescriptor
    shape: MixedShape
    batch: InputBatch | None = None
    """None: padding alone."""
    num_slots: int = 0
    """That verify drafts."""


ACCEPTED = 1 << 30
"""Added to a draft that chance accepts; no token is as large."""
REJECTED = -2
"""In place of one that it does not; no token."""


class DraftedSteps:
    """The host knows all tokens of these batches."""

    def __init__(self, parts: DraftedParts, queue: BatchQueue) -> None:
        self._parts = parts
        self._queue = queue
        draws = parts.sampler.draft_draws
        self._draws = draws if draws is not None and draws.by_chance else None
        """Where chance decides what is accepted, and not the model."""
        self._is_exact = draws is not None and not draws.by_chance
        """Whether drafts are accepted by rejection sampling."""
        self._guesses: GuessGraphs | None = None
        self._found: GuessDownloads | None = None
        self._go_on: Callable[[MixedTensors, BatchBounds], None] | None = None
        """Guesses behind a step, where somebody does on the device."""
        self._replayed: _Replayed | None = None
        """The step that ran last, where it was a graph's and sampled there."""
        self._ends = {tail: parts.graphs.wrap(partial(self._sample, tail)) for tail in CAPTURED_TAILS}

    def run(self, batch: InputBatch, tail: StepTail) -> tuple[DraftedRows, Callable[[], None] | None]:
        """A batch alone, padded to a graph that samples too, or with anything else. Returns how its results lie, and
        what samples it, where that is still to be done."""
        parts = self._parts
        num_rows = len(batch.sampled_slots)
        scores = parts.sampler.logprobs.scores(batch.slots)
        mode, key, shape, bounds = self._shape(batch, scores)
        packed = shape.pack_drafts(batch, parts.slots.pad_slot)
        if self._draws is not None and tail is not StepTail.LOGITS:
            self._leave_to_chance(packed, shape, batch, self._draws)
        fill = None if batch.guessed is None or self._guesses is None else self._fill(packed, shape, batch)
        tensors = self._queue.upload(packed, shape, key.query_len > 1, fill)
        alike = key.query_len > 1 and tail is not StepTail.LOGITS
        rows = DraftedRows.of(batch, shape if alike else None)
        if scores:
            logits = self._queue.queue_scored(batch, tensors, bounds, key)
        else:
            logits = self._queue.queue(tensors, bounds, mode, key, (self._ends[tail],) if alike else ())
        self._replayed = _Replayed(tensors, bounds, key, shape, batch, rows.num_slots) if alike else None
        if alike:
            return rows, None
        logits, tensors = logits[:num_rows], tensors.first(num_rows, rows.num_slots)
        if tail is StepTail.LOGITS:
            return rows, partial(self._sample_processed, logits, batch, tensors)
        self._sample(tail, logits, tensors)
        return rows, None

    def guess_with(self, steps: GuessSteps, transfers: Transfers) -> None:
        """As `GuessesBehind` says, of graphs."""
        if isinstance(steps, GuessGraphs):
            graphs = self._parts.graphs
            self._guesses = steps
            self._found = GuessDownloads(transfers, steps.drafts)
            self._go_on = graphs.wrap(partial(steps.go_on, self._parts.slots))
            steps.num_graphs += graphs.num_verifying

    @torch.inference_mode()
    def guess(self, batch: InputBatch) -> Pending[Int32Array] | None:
        """Queue guesses behind the step that ran last, if that was of this batch and a graph: [R, drafts] on their way;
        None where they are not guessed so. See `GuessesBehind`."""
        step = self._replayed
        if step is None or step.batch is not batch or self._found is None:
            return None
        self._found.finish()
        return self._found.start(step.num_slots) if self._guess_behind(step, GraphMode.FULL) else None

    def _guess_behind(self, step: "_Replayed", mode: GraphMode) -> bool:
        if self._guesses is None or self._go_on is None or not self._guesses.goes_on(step.shape):
            return False
        with self._guesses.context(mode, step.key):
            self._go_on(step.tensors, step.bounds)
        return True

    def run_shape(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """A step of padding alone in the shape of a graph, with every end there is a graph for."""
        parts = self._parts
        shape = MixedShape(key.num_tokens, key.num_tokens // key.query_len, key.num_tokens)
        tensors = self._padding(shape)
        bounds = shape.verification(key.query_len)
        if mode is GraphMode.FULL:  # or buffers that planners keep for this size would be the graph's own
            parts.groups.plan_with(partial(parts.batch.mixed_common, tensors, bounds))
        self._queue.queue(tensors, bounds, mode, key, tuple(self._ends.values()))
        step = _Replayed(tensors, bounds, key, shape)
        if mode is GraphMode.FULL:  # what planners keep, as above, and what is compiled at its first launch
            self._guess_behind(step, GraphMode.NONE)
        self._guess_behind(step, mode)

    def run_largest(self, most: int) -> None:
        """A step of padding in which as many rows are sampled as there may be, of so many requests."""
        count = self._parts.batch.max_rows
        shape = MixedShape(count, min(most, count), count)
        tensors = self._padding(shape)
        key = BatchDescriptor(count, shape.num_requests)
        self._sample(StepTail.RANDOM, self._queue.queue(tensors, shape.bounds, GraphMode.NONE, key), tensors)

    def shapes(self, most: int) -> list[BatchDescriptor]:
        """What to precompile, of at most so many requests: which kernels run changes at powers of two."""
        most_rows = self._parts.batch.max_rows
        return [
            BatchDescriptor(length << power, 1 << power, True)
            for length in self._parts.graphs.verify_lens
            for power in range(min(most_rows // length, most).bit_length())
        ]

    def _shape(self, batch: InputBatch, scores: bool) -> tuple[GraphMode, BatchDescriptor, MixedShape, BatchBounds]:
        graphs = self._parts.graphs
        num_tokens = batch.num_tokens
        num_requests = len(batch.slots)
        num_rows = len(batch.sampled_slots)
        if scores:
            key = BatchDescriptor(num_tokens, num_requests)
            return GraphMode.NONE, key, MixedShape(num_tokens, num_requests, num_rows), BatchBounds.of(batch)
        alone = num_tokens == num_rows
        longest = batch.max_query_len
        found = graphs.choose_verification(num_tokens, num_requests, longest) if alone else None
        if found is not None:
            return GraphMode.FULL, found, *_verification(found)
        mode, key, whole = graphs.choose_mixed(num_tokens, max(num_requests, num_rows))
        if whole and key.num_requests is not None:
            shape = MixedShape(key.num_tokens, key.num_requests, key.num_requests)
            return mode, key, shape, shape.bounds
        bounds = BatchBounds.of(batch).verifying(graphs.verify_len(longest) if alone else 0)
        return mode, key, MixedShape(key.num_tokens, num_requests, num_rows), bounds

    def _fill(self, packed: Int32Array, shape: MixedShape, batch: InputBatch) -> tuple[Tensor, list[Int32Array]]:
        """The guesses on the device, and which of them belong where in what is packed, with what is added to them."""
        if self._guesses is None or batch.guessed is None:
            raise RuntimeError("nobody guesses on the device")
        places = places_of(shape)
        rows = np.flatnonzero(batch.guessed >= 0)
        sources = batch.guessed[rows]
        targets = places[2].start + batch.logits_index[rows] + 1
        if self._draws is None:
            targets = np.concatenate((targets, places[-1].start + rows), dtype=np.int32)
            return self._guesses.drafts, [targets, np.concatenate((sources, sources)), np.zeros_like(targets)]
        ids = packed[places[-1]][rows]
        verified = ids != REJECTED
        targets = np.concatenate((targets, places[-1].start + rows[verified]))
        added = np.where(ids[verified] >= ACCEPTED, ACCEPTED, 0)
        arrays = targets, np.concatenate((sources, sources[verified])), np.append(np.zeros_like(rows), added)
        return self._guesses.drafts, [array.astype(np.int32) for array in arrays]

    @staticmethod
    def _leave_to_chance(packed: Int32Array, shape: MixedShape, batch: InputBatch, draws: DraftDraws) -> None:
        """Say of each draft whether it is accepted."""
        ids = packed[places_of(shape)[-1]][: len(batch.sampled_slots)]
        accepted = draws.accepted(batch.sampled)
        if accepted is not None:
            ids[ids >= 0] = np.where(accepted, ids + ACCEPTED, REJECTED)[ids >= 0]

    def _padding(self, shape: MixedShape) -> MixedTensors:
        parts = self._parts
        pad_slot = parts.slots.pad_slot
        return self._queue.upload(shape.pack_drafts(shape.padding(pad_slot, parts.batch.max_seq_len), pad_slot), shape)

    def _sample(self, tail: StepTail, logits: Tensor, tensors: MixedTensors) -> None:
        """How a batch ends; part of a graph where there is one."""
        slots = tensors.sampled_slots
        positions = tensors.sampled_positions.long()
        sampled = sample_rows(logits, tail, self._parts.slots.sampling, slots, positions, self._changing(tensors))
        if self._draws is not None and tensors.drafts is not None:
            ids = tensors.drafts.ids
            ids = torch.where(ids >= ACCEPTED, ids - ACCEPTED, ids)
            sampled = torch.where(tensors.drafts.ids >= ACCEPTED, ids.to(sampled.dtype), sampled)
            tensors = replace(tensors, drafts=tensors.drafts._replace(ids=ids))
        self._store(tensors, slots, sampled)

    def _sample_processed(self, logits: Tensor, batch: InputBatch, tensors: MixedTensors) -> None:
        if tensors.drafts is not None:
            self._parts.sampler.expect(batch.sampled, tensors.drafts.ids)
        positions = tensors.sampled_positions.long()
        store = partial(self._store, tensors)
        self._queue.end(logits, batch, tensors.sampled_slots, positions, store, self._changing(tensors))

    def _changing(self, tensors: MixedTensors) -> Tensor | None:
        """[L] int64 drafts that change how tokens are drawn in their places; None: none does."""
        return tensors.drafts.ids.long() if self._is_exact and tensors.drafts is not None else None

    def _store(self, tensors: MixedTensors, slots: Tensor, sampled: Tensor) -> None:
        if tensors.drafts is None:
            raise RuntimeError("the batch was packed without drafts")
        states = self._parts.slots
        batching.end_verification(*tensors.drafts, sampled, states.last_tokens, states.results, states.turn)


@lru_cache(maxsize=256)
def _verification(key: BatchDescriptor) -> tuple[MixedShape, BatchBounds]:
    """What a graph of steps that verify drafts holds."""
    shape = MixedShape(key.num_tokens, key.num_tokens // key.query_len, key.num_tokens)
    return shape, shape.verification(key.query_len)


def sample_rows(
    logits: Tensor,
    tail: StepTail,
    settings: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Tensor | None = None,
) -> Tensor:
    """[L, V] logits, how slots sample, [L] slots and positions of the tokens to be sampled -> [L] tokens. `drafts`: [L]
    int64 those in their places, where they are accepted by rejection sampling; negative where there is none."""
    if tail is StepTail.GREEDY:
        return sample_greedy(logits)
    if drafts is not None:
        return sample_with_drafts(logits, settings, slots, positions, drafts)
    return sample_random(logits, settings, slots, positions)
