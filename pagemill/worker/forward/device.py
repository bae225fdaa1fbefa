"""`DeviceForward`: steps are queued on a device ahead of the tokens they need. One stage, all of the model.

A decode batch is two pieces of work: tokens from the slots and the network; then sampling, and what the next step
needs. The host sends nothing when the requests are those of the step before and no block was added. Another batch is
sent as a whole; small ones are one piece of work up to the logits. Tokens come back through a copy of their own, while
the next step runs. Where slots verify drafts, the device compares, and the same copy brings how many were right.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagemill.config.graph_mode import GraphMode
from pagemill.messages.pending import Pending, Ready
from pagemill.messages.step import Int32Array, KnownTokens, NewRequest
from pagemill.model.forward_context import BatchDescriptor, ForwardContext, current_forward, forward_context
from pagemill.model.kernels import batching
from pagemill.model.models.causal_lm import CausalLM
from pagemill.platforms.interface import Transfers
from pagemill.worker.batch.buffers import UploadRing
from pagemill.worker.batch.device_states import DeviceStates, known_tokens
from pagemill.worker.batch.input_batch import InputBatch, Int64Array
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.forward.decode_rows import DecodeRows
from pagemill.worker.forward.device_batch import DeviceBatch
from pagemill.worker.forward.downloads import Downloads, DraftedRows, ScoredTokens, VerifiedTokens
from pagemill.worker.forward.drafted_steps import BatchEnd, DraftedParts, DraftedSteps, sample_rows
from pagemill.worker.forward.interface import Forward, SampledTokens
from pagemill.worker.forward.mixed_batch import BatchBounds, MixedShape, MixedTensors
from pagemill.worker.forward.shared_prefix import SharedPrefix
from pagemill.worker.forward.step_graphs import CAPTURED_TAILS, StepGraphs, StepTail
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.sampling.logprobs import KnownValues, SampledValues
from pagemill.worker.sampling.sampler import Sampler
from pagemill.worker.spec_decode.hidden_states import HiddenStates, sampled_rows

PRECOMPILED_REQUESTS = 64
"""Of a cascade: its kernels are the same for any number."""
FEW_TOKENS = 64
"""Of a step: beyond, linear layers are the library's."""
WHOLE_ROWS = 16
"""Of a greedy decode step that is one graph; larger ones are two, of which the first serves all tails."""


class DeviceForward(Forward):
    """`sampler` changes logits where a request asks for it; sampling itself is done on the device. With `shared`,
    decode batches of one long prefix are cascades, which no captured graph holds."""

    runs_ahead = True

    def __init__(
        self,
        model: CausalLM,
        states: RequestStates,
        batch: DeviceBatch,
        groups: AttentionGroups,
        sampler: Sampler,
        transfers: Transfers,
        graphs: StepGraphs,
        device: torch.device,
        shared: SharedPrefix | None = None,
        hidden: HiddenStates | None = None,
    ) -> None:
        """`hidden`: where somebody reads hidden states."""
        num_slots = len(states.num_tokens)
        max_rows = batch.max_requests + batch.max_rows
        self._model = model
        self._states = states
        self._batch = batch
        self._groups = groups
        self._sampler = sampler
        self._transfers = transfers
        self._graphs = graphs
        self._shared = shared
        self._slots = DeviceStates(num_slots, max_rows, device)
        self._rows = DecodeRows(states, self._slots.pad_slot)
        self.num_graphs = graphs.num_graphs
        self.uploads: UploadRing = UploadRing(transfers, device, 4 * (batch.max_tokens + 4 * batch.max_requests))
        self._downloads = Downloads(transfers, self._slots.results)
        self._added: list[int] = []
        self._sampled_values: list[SampledValues] = []
        self._known_values: list[KnownValues] = []
        self._unsampled: Callable[[], None] | None = None
        """What samples the batch that was run, where its logits are changed first: it is queued by `sample`, for what
        changes them may not be known before."""
        self._planned: dict[str, object] = {}
        """Metadata of the step, where the network finds it."""
        self._network = graphs.graphs.wrap_model(model)
        self._hidden = hidden
        self._mixed = graphs.wrap(self._mixed_step)
        self._decode = graphs.wrap(self._decode_step)
        self._greedy = graphs.wrap(self._greedy_step)
        self._tails = {tail: graphs.wrap(partial(self._sample_decode, tail)) for tail in CAPTURED_TAILS}
        parts = DraftedParts(batch, self._slots, graphs, groups, sampler)
        self._drafts = DraftedSteps(parts, self) if batch.max_rows else None
        """Where there are drafts."""
        self.behind = self._drafts
        self._kept: dict[MixedShape, MixedTensors] = {}
        """Tensors of batches that are replays and verify drafts."""
        self._drafted: DraftedRows | None = None
        """Of the batch that was run, where slots verify drafts."""

    def add(self, new: NewRequest) -> None:
        self._sampler.add(new)
        self._added.append(new.slot)
        self._rows.forget()

    def remove(self, slot: int) -> None:
        self._sampler.remove(slot)

    def replace(self, known: KnownTokens) -> None:
        self._sampler.replace(known)
        self._rows.forget()

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> None:
        self._sampled_values, self._known_values = [], []
        self.has_known_logprobs = False
        self._drafted = None
        if self._hidden is not None:
            self._hidden.batch = batch
        tail = _tail(batch, self._states, self._sampler)
        num_rows = len(batch.slots)
        scores = self._sampler.logprobs.scores(batch.slots)
        decodes = batch.num_tokens == num_rows == len(batch.sampled_slots) and not scores
        shared = self._shared.tokens(batch) if decodes and self._shared is not None else ()
        if decodes and not shared:
            self._run_decode(batch, tail)
        else:
            self._run_mixed(batch, tail, shared)

    def sample(self, batch: InputBatch) -> Pending[SampledTokens]:
        if self._unsampled is not None:
            with torch.inference_mode():
                self._unsampled()
            self._unsampled = None
            self._downloads.queued()
        count = len(batch.sampled_slots)
        rows = self._drafted
        tokens: Pending[SampledTokens]
        if rows is not None:
            tokens = VerifiedTokens(self._downloads.start(rows.num_elements), rows)
        else:
            tokens = self._downloads.start(count) if count else Ready(SampledTokens(batch.sampled_slots))
        if not self._sampled_values and not self._known_values:
            return tokens
        return ScoredTokens(tokens, self._sampled_values, self._known_values, self._transfers)

    # --- decode batches -------------------------------------------------------------------------------------------

    def _run_decode(self, batch: InputBatch, tail: StepTail) -> None:
        mode, key = self._graphs.choose(len(batch.slots))
        num_rows = key.num_tokens
        sent = self._send(self._rows.changes(batch, num_rows))
        if sent:
            slots, positions, known_slots, known = sent
            self._batch.slots[:num_rows].copy_(slots)
            self._batch.next_positions[:num_rows].copy_(positions)
            if len(known):
                self._slots.last_tokens.index_copy_(0, known_slots.long(), known.long())
            self.uploads.uploads_consumed()
        logits = self._queue_decode(mode, key, batch.positions, () if tail is StepTail.LOGITS else (tail,))
        if tail is StepTail.LOGITS:
            count = len(batch.slots)
            positions = self._batch.positions[:count] + 1
            slots = self._batch.slots[:count]
            self._unsampled = partial(self.end, logits[:count], batch, slots, positions, partial(_store, self._slots))
        else:
            self._downloads.queued()

    def _queue_decode(
        self, mode: GraphMode, key: BatchDescriptor, positions: Int64Array, tails: Sequence[StepTail]
    ) -> Tensor:
        """`positions`: of the rows that are no padding, as the host knows them. Returns the logits, or what few rows
        have sampled that only end greedily."""
        self._planned.clear()
        if mode is GraphMode.FULL and not self._plan_replay(key, positions):
            mode = GraphMode.NONE
        with forward_context(ForwardContext(self._planned, mode, key)):
            if key.num_tokens <= WHOLE_ROWS and tuple(tails) == (StepTail.GREEDY,):
                sampled: Tensor = self._greedy(key.num_tokens)
                return sampled
            logits: Tensor = self._decode(key.num_tokens)
            for tail in tails:
                self._tails[tail](logits)
        return logits

    def _plan_replay(self, key: BatchDescriptor, positions: Int64Array) -> bool:
        """Have those plan that plan on the host; False where there is no memory for their part of the graph."""
        try:
            self._groups.before_replay(partial(self._batch.decode_on_host, key.num_tokens, positions))
        except torch.OutOfMemoryError:
            self._graphs.graphs.drop(GraphMode.FULL, key)
            return False
        return True

    def _decode_step(self, num_rows: int) -> Tensor:
        """What a captured graph holds, for as many rows: the logits. Its only inputs are buffers of `DeviceBatch` and
        of the slots."""
        buffers = self._batch
        states = self._slots
        slots = buffers.slots[:num_rows]
        positions = buffers.positions[:num_rows]
        batching.begin_decode(
            slots,
            buffers.next_positions[:num_rows],
            states.last_tokens,
            buffers.token_ids[:num_rows],
            positions,
            buffers.seq_lens[:num_rows],
            [buffers.table_rows(group, num_rows) for group in self._groups.indices],
        )
        replayed = current_forward().graph_mode is GraphMode.FULL
        self._planned.update(self._groups.plan_with(partial(buffers.decode_common, replayed, num_rows)))
        given = self._network(buffers.token_ids[:num_rows], positions)
        return self._model.compute_logits(sampled_rows(self._hidden, given))

    def _sample_decode(self, tail: StepTail, logits: Tensor) -> Tensor:
        """What another captured graph holds, behind that one. Returns the sampled tokens."""
        buffers = self._batch
        num_rows = len(logits)
        slots = buffers.slots[:num_rows]
        sampled = sample_rows(logits, tail, self._slots.sampling, slots, buffers.positions[:num_rows] + 1)
        _store(self._slots, slots, sampled)
        return sampled

    def _greedy_step(self, num_rows: int) -> Tensor:
        """Both as one graph: where a step is short, the way from one to the next is more than a percent of it."""
        return self._sample_decode(StepTail.GREEDY, self._decode_step(num_rows))

    # --- shapes without a request ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def precompile(self) -> None:
        for key in _keys_to_precompile(self._batch.max_requests, self._graphs.graphs.keys_at_start()):
            self._run_shape(GraphMode.NONE, key)
        for key in () if self._drafts is None else self._drafts.shapes(len(self._states.num_tokens)):
            self._run_shape(GraphMode.NONE, key)
        self._run_cascade(PRECOMPILED_REQUESTS)
        self._sampler.precompile()

    @torch.inference_mode()
    def run_largest(self) -> None:
        most = len(self._states.num_tokens)
        self._run_cascade(most)
        if self._drafts is not None:
            self._drafts.run_largest(most)
            self._slots.turn.fill_(self._downloads.next_turn)
        if self._graphs.num_graphs:
            self._groups.before_replay(partial(self._batch.decode_on_host, most, np.zeros(0, np.int64)))

    def _run_cascade(self, most: int) -> None:
        """A decode step of padding, of so many requests if there may be, that is told of a prefix as long as there may
        be; nothing where no step is a cascade."""
        prefix = self._shared
        if prefix is None:
            return
        buffers = self._batch
        count = min(self._batch.max_requests, most)
        longest = [buffers.max_seq_len - 1] * len(buffers.tables)
        shared = prefix.used(longest, count)
        shape = MixedShape(count, count)
        if shared:
            packed = shape.pack(shape.padding(self._slots.pad_slot, 1), np.ones(count, bool), self._slots.pad_slot)
            bounds = BatchBounds(count, 1, 1, None, shared)
            key = BatchDescriptor(count, count)
            self.queue(self.upload(packed, shape), bounds, GraphMode.NONE, key)

    @torch.inference_mode()
    def capture_at_start(self) -> None:
        self._graphs.graphs.capture_at_start(self._run_shape)

    @torch.inference_mode()
    def capture_one(self) -> bool:
        return self._graphs.graphs.capture_one(self._run_shape)

    def _run_shape(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """A step of padding alone, with every tail there is a graph for."""
        buffers = self._batch
        count = key.num_tokens
        pad_slot = self._slots.pad_slot
        self._rows.forget()
        if self._drafts is not None and key.query_len > 1:
            self._drafts.run_shape(mode, key)
            self._slots.turn.fill_(self._downloads.next_turn)
            return
        if key.uniform:
            buffers.slots[:count].fill_(pad_slot)
            buffers.next_positions[:count].zero_()
            if mode is GraphMode.FULL:  # or buffers that planners keep for this size would be the graph's own
                self._groups.plan_with(partial(buffers.decode_common, False, count))
                if not self._plan_replay(key, np.zeros(0, np.int64)):
                    return
                if count <= WHOLE_ROWS:
                    self._queue_decode(mode, key, np.zeros(0, np.int64), (StepTail.GREEDY,))
            self._queue_decode(mode, key, np.zeros(0, np.int64), CAPTURED_TAILS)
            # Nobody reads what was sampled, if it was.
            self._slots.turn.fill_(self._downloads.next_turn)
            return
        whole = key.num_requests is not None
        shape = MixedShape(count, key.num_requests or 1)
        batch = shape.padding(pad_slot, buffers.max_seq_len)
        packed = shape.pack(batch, np.ones(shape.num_requests, bool), pad_slot)
        bounds = shape.bounds if whole else BatchBounds.of(batch)
        tensors = self.upload(packed, shape)
        if mode is GraphMode.FULL:
            self._groups.plan_with(partial(buffers.mixed_common, tensors, bounds))
        self.queue(tensors, bounds, mode, key)

    # --- other batches --------------------------------------------------------------------------------------------

    def _run_mixed(self, batch: InputBatch, tail: StepTail, shared: tuple[int, ...] = ()) -> None:
        """`shared`: as in `BatchBounds`."""
        self._rows.forget()
        if self._drafts is not None and batch.verifies:
            self._drafted, self._unsampled = self._drafts.run(batch, tail)
            if self._unsampled is None:
                self._downloads.queued()
            return
        mode, key, whole = self._graphs.choose_mixed(batch.num_tokens, len(batch.slots), bool(shared))
        scores = self._sampler.logprobs.scores(batch.slots)
        if scores:
            # In no graph: few requests ask for it, and what they compute is long.
            mode = GraphMode.NONE
            key = BatchDescriptor(batch.num_tokens, len(batch.slots))
            whole = False
        shape = MixedShape(key.num_tokens, key.num_requests or len(batch.slots))
        packed = shape.pack(batch, known_tokens(self._states, batch.slots), self._slots.pad_slot)
        bounds = shape.bounds if whole else BatchBounds.of(batch, shared)
        tensors = self.upload(packed, shape)
        logits = self.queue_scored(batch, tensors, bounds, key) if scores else self.queue(tensors, bounds, mode, key)
        count = len(batch.sampled_slots)
        if not count:
            return
        # Sampling is queued while the device computes the logits: in the graph it would only make more graphs.
        slots = tensors.sampled_slots[:count]
        positions = tensors.sampled_positions[:count].long()
        if tail is StepTail.LOGITS:
            self._unsampled = partial(self.end, logits[:count], batch, slots, positions, partial(_store, self._slots))
        else:
            _store(self._slots, slots, sample_rows(logits[:count], tail, self._slots.sampling, slots, positions))
            self._downloads.queued()

    def upload(
        self,
        packed: Int32Array,
        shape: MixedShape,
        kept: bool = False,
        fill: tuple[Tensor, list[Int32Array]] | None = None,
    ) -> MixedTensors:
        """The batch on the device. `kept`: the shape is a graph's, whose tensors are looked up the next time."""
        sent, *places = self._send([packed, *(fill[1] if fill else ())])
        memory = self._batch.mixed[: len(sent)].copy_(sent)
        if fill:
            targets, sources, added = places
            values = fill[0].view(-1).index_select(0, sources).clamp_(min=0).add_(added)
            memory.index_copy_(0, targets.long(), values)
        self.uploads.uploads_consumed()
        if not kept:
            return shape.tensors(memory)
        if shape not in self._kept:
            self._kept[shape] = shape.tensors(memory)
        return self._kept[shape]

    def queue(
        self,
        tensors: MixedTensors,
        bounds: BatchBounds,
        mode: GraphMode,
        key: BatchDescriptor,
        ends: Sequence[BatchEnd] = (),
    ) -> Tensor:
        """[L, V] logits. `ends`: what ends the batch, in the same graph mode; otherwise it is somebody else's."""
        self._planned.clear()
        with forward_context(ForwardContext(self._planned, mode, key)):
            logits: Tensor = self._mixed(tensors, bounds)
            for end in ends:
                end(logits, tensors)
        return logits

    def _mixed_step(self, tensors: MixedTensors, bounds: BatchBounds) -> Tensor:
        """What a captured graph holds; its inputs are those of `MixedShape.tensors`. Returns the logits of a row for
        each request: where a part of a prompt is computed, one too many costs less than a case of its own."""
        buffers = self._batch
        token_ids, positions = buffers.place_tokens(tensors, self._slots.last_tokens, self._groups.indices)
        self._planned.update(self._groups.plan_with(partial(buffers.mixed_common, tensors, bounds)))
        rows = tensors.logits_index
        whole = self._graphs.graphs.compiles or (self._hidden is not None and self._hidden.wanted.final)
        if whole or current_forward().graph_mode is GraphMode.PIECEWISE:
            # A piece has one shape for a number of tokens, however many requests they are of.
            chosen = sampled_rows(self._hidden, self._network(token_ids, positions), rows)
        else:
            chosen = sampled_rows(self._hidden, self._network(token_ids, positions, rows))
        return self._model.compute_logits(chosen)

    def queue_scored(
        self, batch: InputBatch, tensors: MixedTensors, bounds: BatchBounds, key: BatchDescriptor
    ) -> Tensor:
        """[L, V] logits of a batch with parts of prompts whose tokens are scored: all hidden states are needed."""
        self._planned.clear()
        with forward_context(ForwardContext(self._planned, GraphMode.NONE, key)):
            token_ids, positions = self._batch.place_tokens(tensors, self._slots.last_tokens, self._groups.indices)
            self._planned.update(self._groups.plan_with(partial(self._batch.mixed_common, tensors, bounds)))
            given = self._network(token_ids, positions)
            hidden = given if self._hidden is None else self._hidden.take(given)
        recorder = self._sampler.logprobs
        compute = self._model.compute_logits
        self._known_values = recorder.score_known(batch, hidden, compute)
        self.has_known_logprobs = bool(self._known_values)
        rows = hidden.index_select(0, tensors.logits_index[: len(batch.sampled_slots)])
        if self._hidden is not None:
            self._hidden.take_sampled(rows)
        return compute(rows) if len(rows) else rows

    # --- both -----------------------------------------------------------------------------------------------------

    def _send(self, arrays: Sequence[Int32Array]) -> list[Tensor]:
        """Bring the arrays to the device, with what changed of slots and tables since the last step, which is applied.
        Without a change, and without arrays, nothing is sent."""
        tables = [(table, changes) for table in self._batch.tables if (changes := table.take_changes()) is not None]
        if not tables and not self._added:
            return self.uploads.send(arrays) if arrays else []
        added = np.array(list(dict.fromkeys(self._added)), np.int32)
        self._added = []
        packed = [array for _, changes in tables for array in changes]
        sampling = self._slots.sampling_rows(self._states, added)
        sent = self.uploads.send([*packed, added, sampling, *arrays])
        for index, (table, _) in enumerate(tables):
            batching.write_places(table.device_blocks, sent[2 * index], sent[2 * index + 1])
        changed, rows, *rest = sent[2 * len(tables) :]
        if len(added):
            self._slots.sampling.index_copy_(0, changed.long(), rows)
        if not rest:
            self.uploads.uploads_consumed()
        return rest

    def end(
        self,
        logits: Tensor,
        batch: InputBatch,
        slots: Tensor,
        positions: Tensor,
        store: Callable[[Tensor, Tensor], None],
        drafts: Tensor | None = None,
    ) -> None:
        """Sample from logits that processors change first, or that requests are told of; `store` keeps the tokens."""
        settings = self._slots.sampling
        rows = batch.sampled
        tail = StepTail.GREEDY if self._states.greedy[rows.slots].all() else StepTail.RANDOM
        parts = []
        for part in self._sampler.logprobs.parts(rows):
            of_part = None if drafts is None else drafts[part]
            choose = partial(sample_rows, logits[part], tail, settings, slots[part], positions[part], of_part)
            sampled, values = self._sampler.choose(logits[part], rows[part], choose, part.start)
            parts.append(sampled)
            self._sampled_values += [] if values is None else [values]
        store(slots, parts[0] if len(parts) == 1 else torch.cat(parts))


def _keys_to_precompile(most: int, captured: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
    """Steps of up to `most` requests, of few sizes: which kernels run changes at powers of two, and for prompts up to
    `FEW_TOKENS`."""
    counts = [1 << power for power in range(most.bit_length())]
    decode = [BatchDescriptor(count, count, True) for count in counts]
    prompts = [BatchDescriptor(count, 1) for count in counts if 1 < count <= FEW_TOKENS]
    return list(dict.fromkeys([*(key for key in captured if key.num_tokens.bit_count() == 1), *decode, *prompts]))


def _tail(batch: InputBatch, states: RequestStates, sampler: Sampler) -> StepTail:
    """What a batch ends with."""
    slots = batch.slot_rows.slots if batch.known_rows is not None else batch.sampled_slots
    if sampler.active and states.processed[slots].any():
        return StepTail.LOGITS
    return StepTail.GREEDY if states.greedy[slots].all() else StepTail.RANDOM


def _store(states: DeviceStates, slots: Tensor, sampled: Tensor) -> None:
    batching.end_step(slots, sampled, states.last_tokens, states.results, states.turn)
