"""`DeviceForward`: steps are queued on a device ahead of the tokens they need. One stage, all of the model.

A decode batch is one piece of work: tokens from the slots, network, sampling, and what the next step needs. The host
sends nothing when the requests are those of the step before and no block was added. Other batches are queued part by
part. Tokens come back through a copy of their own, while the next step runs.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagemill.config.graph_mode import GraphMode
from pagemill.messages.step import Int32Array, NewRequest
from pagemill.model.forward_context import BatchDescriptor, ForwardContext, forward_context
from pagemill.model.kernels import batching
from pagemill.model.kernels.batching_reference import SlotTokens
from pagemill.model.models.causal_lm import CausalLM
from pagemill.platforms.interface import Mark, Transfers
from pagemill.worker.batch.buffers import UploadRing
from pagemill.worker.batch.device_states import RESULT_TURNS, DeviceStates, known_tokens
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.forward.decode_rows import DecodeRows
from pagemill.worker.forward.device_batch import DeviceBatch, MixedRequests
from pagemill.worker.forward.interface import Forward, TokensSoon
from pagemill.worker.forward.step_graphs import Ending, StepGraphs
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.sampling.device_sampler import sample_greedy, sample_random
from pagemill.worker.sampling.sampler import Sampler


class DeviceForward(Forward):
    """`sampler` changes logits where a request asks for it; sampling itself is done on the device."""

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
    ) -> None:
        num_slots = len(states.num_tokens)
        self._model = model
        self._states = states
        self._batch = batch
        self._groups = groups
        self._sampler = sampler
        self._transfers = transfers
        self._graphs = graphs
        self._slots = DeviceStates(num_slots, batch.max_requests, device)
        self._rows = DecodeRows(states, self._slots.pad_slot)
        self.num_graphs = graphs.num_graphs
        self.uploads: UploadRing = UploadRing(transfers, device, 4 * (batch.max_tokens + 4 * batch.max_requests))
        self._downloads = Downloads(transfers, self._slots.results)
        self._added: list[int] = []
        self._planned: dict[str, object] = {}
        """Metadata of the step, where the network finds it."""
        self._network = graphs.graphs.wrap_model(model)
        self._decode = {ending: graphs.wrap(partial(self._decode_step, ending=ending)) for ending in Ending}

    def add(self, new: NewRequest) -> None:
        self._sampler.add(new)
        self._added.append(new.slot)
        self._rows.forget()

    def remove(self, slot: int) -> None:
        self._sampler.remove(slot)

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> None:
        ending = self._ending(batch)
        num_rows = len(batch.slots)
        if batch.num_tokens == num_rows == len(batch.sampled_slots):
            self._run_decode(batch, ending)
        else:
            self._run_mixed(batch, ending)

    def sample(self, batch: InputBatch) -> TokensSoon:
        return self._downloads.start(len(batch.sampled_slots))

    # --- decode batches -------------------------------------------------------------------------------------------

    def _run_decode(self, batch: InputBatch, ending: Ending) -> None:
        mode, key = self._graphs.choose(ending, len(batch.slots))
        num_rows = key.num_tokens
        sent = self._send(self._rows.changes(batch, num_rows))
        if sent:
            slots, positions, known_slots, known = sent
            self._batch.slots[:num_rows].copy_(slots)
            self._batch.next_positions[:num_rows].copy_(positions)
            if len(known):
                self._slots.last_tokens.index_copy_(0, known_slots.long(), known.long())
            self.uploads.sent_is_used()
        logits = self._queue_decode(ending, mode, key)
        if ending is Ending.LOGITS:
            count = len(batch.slots)
            self._end(logits[:count], batch, self._batch.slots[:count], self._batch.positions[:count] + 1)
        self._downloads.queued()

    def _queue_decode(self, ending: Ending, mode: GraphMode, key: BatchDescriptor) -> Tensor:
        self._planned.clear()
        with forward_context(ForwardContext(self._planned, mode, key)):
            return self._decode[ending](key.num_tokens)

    def _decode_step(self, num_rows: int, *, ending: Ending) -> Tensor:
        """What a captured graph holds, for as many rows. Its only inputs are buffers of `DeviceBatch` and of the slots;
        returns the logits, or the sampled tokens."""
        here, states = self._batch, self._slots
        slots, positions = here.slots[:num_rows], here.positions[:num_rows]
        batching.begin_decode(
            slots,
            here.next_positions[:num_rows],
            states.last_tokens,
            here.token_ids[:num_rows],
            positions,
            here.seq_lens[:num_rows],
            [here.table_rows(group, num_rows) for group in self._groups.indices],
        )
        self._planned.update(self._groups.plan_with(lambda group: here.decode_common(group, num_rows)))
        hidden = self._network(here.token_ids[:num_rows], positions)
        if ending is Ending.LOGITS:
            return self._model.compute_logits(hidden)
        sampled = self._sample(hidden, ending, slots, positions + 1)
        batching.end_step(slots, sampled, states.last_tokens, states.results, states.turn)
        return sampled

    # --- shapes without a request ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_at_start(self) -> None:
        self._graphs.graphs.capture_at_start(self._run_shape)

    @torch.inference_mode()
    def capture_one(self) -> bool:
        return self._graphs.graphs.capture_one(self._run_shape)

    def _run_shape(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """A step of padding alone."""
        here, count = self._batch, key.num_tokens
        self._rows.forget()
        if mode is GraphMode.FULL or key.uniform:
            here.slots[:count].fill_(self._slots.pad_slot)
            here.next_positions[:count].zero_()
            self._queue_decode(Ending.GREEDY, self._graphs.admit(Ending.GREEDY, mode, key), key)
            self._downloads.queued()
            return
        self._pad(0, count)
        start = here.decode_query_start[:2] * count
        pad_slot = here.decode_query_start[:1] + self._slots.pad_slot
        told = MixedRequests(pad_slot, start, start[1:], count, count, count)
        self._planned.clear()
        self._planned.update(self._groups.plan_with(partial(here.mixed_common, told, count)))
        with forward_context(ForwardContext(self._planned, mode, key)):
            self._network(here.token_ids[:count], here.positions[:count])

    # --- other batches --------------------------------------------------------------------------------------------

    def _run_mixed(self, batch: InputBatch, ending: Ending) -> None:
        here, count = self._batch, batch.num_tokens
        self._rows.forget()
        mode, key = self._graphs.graphs.choose(count, len(batch.slots), False)
        known = np.repeat(known_tokens(self._states, batch.slots), np.diff(batch.query_start))
        sent = self._send(
            [
                batch.token_slots,
                known.astype(np.int32),
                batch.token_ids.astype(np.int32),
                batch.positions.astype(np.int32),
                batch.slots,
                batch.query_start,
                batch.seq_lens,
                batch.logits_index.astype(np.int32),
                batch.sampled_slots,
                batch.sampled_positions.astype(np.int32),
            ]
        )
        slots, query_start, seq_lens, wanted, sampled, at = sent[4:]
        batching.place_tokens(
            SlotTokens(*sent[:4]),
            self._slots.last_tokens,
            here.token_ids[:count],
            here.positions[:count],
            [here.mapping(group, count) for group in self._groups.indices],
        )
        self._pad(count, key.num_tokens)
        self._planned.clear()
        told = MixedRequests(slots, query_start, seq_lens, batch.max_query_len, batch.max_seq_len, key.num_tokens)
        self._planned.update(self._groups.plan_with(partial(here.mixed_common, told, count)))
        with forward_context(ForwardContext(self._planned, mode, key)):
            hidden = self._network(here.token_ids[: key.num_tokens], here.positions[: key.num_tokens])
        if len(wanted):
            rows = hidden.index_select(0, wanted)
            if ending is Ending.LOGITS:
                self._end(self._model.compute_logits(rows), batch, sampled, at.long())
            else:
                tokens = self._sample(rows, ending, sampled, at.long())
                self._keep(sampled, tokens)
            self._downloads.queued()
        self.uploads.sent_is_used()

    def _pad(self, count: int, padded: int) -> None:
        """Tokens that only fill up a graph: they are computed, and nothing is kept of them."""
        if padded == count:
            return
        here = self._batch
        for buffer, value in ((here.token_ids, 0), (here.positions, 0), *((one, -1) for one in here.slot_mapping)):
            buffer[count:padded].fill_(value)

    # --- both -----------------------------------------------------------------------------------------------------

    def _ending(self, batch: InputBatch) -> Ending:
        if self._sampler.active:
            return Ending.LOGITS
        return Ending.GREEDY if self._states.greedy[batch.sampled_slots].all() else Ending.RANDOM

    def _send(self, arrays: Sequence[Int32Array]) -> list[Tensor]:
        """Bring the arrays to the device, with what changed of slots and tables since the last step, which is applied.
        Without a change, and without arrays, nothing is sent."""
        tables = [(table, changes) for table in self._batch.tables if (changes := table.take_changes()) is not None]
        if not arrays and not tables and not self._added:
            return []
        added = np.array(list(dict.fromkeys(self._added)), np.int32)
        self._added = []
        packed = [array for _, changes in tables for array in changes]
        sampling = self._slots.sampling_rows(self._states, added)
        sent = self.uploads.send([*packed, added, sampling, *arrays])
        for index, (table, _) in enumerate(tables):
            batching.write_places(table.device_blocks, sent[2 * index], sent[2 * index + 1])
        here, rows, *rest = sent[2 * len(tables) :]
        if len(added):
            self._slots.sampling.index_copy_(0, here.long(), rows)
        if not rest:
            self.uploads.sent_is_used()
        return rest

    def _sample(self, hidden: Tensor, ending: Ending, slots: Tensor, positions: Tensor) -> Tensor:
        if ending is Ending.GREEDY:
            return sample_greedy(self._model.compute_logits(hidden))
        return sample_random(self._model.compute_logits(hidden), self._slots.sampling, slots, positions)

    def _end(self, logits: Tensor, batch: InputBatch, slots: Tensor, positions: Tensor) -> None:
        """Sample from logits that processors change first."""
        self._sampler.process(logits, batch)
        if self._states.greedy[batch.sampled_slots].all():
            self._keep(slots, sample_greedy(logits))
        else:
            self._keep(slots, sample_random(logits, self._slots.sampling, slots, positions))

    def _keep(self, slots: Tensor, sampled: Tensor) -> None:
        states = self._slots
        batching.end_step(slots, sampled, states.last_tokens, states.results, states.turn)


class Downloads:
    """Brings rows of `results` [turns, R] to the host, one after the other."""

    def __init__(self, transfers: Transfers, results: Tensor) -> None:
        self._transfers = transfers
        self._results = results
        self._host = transfers.host_buffer(tuple(results.shape), "int32")
        self._turn = -1
        self._under_way: deque[DownloadedTokens] = deque()

    def queued(self) -> None:
        """A step was queued that writes the next row."""
        self._turn = (self._turn + 1) % RESULT_TURNS

    def start(self, count: int) -> "DownloadedTokens":
        """The first `count` tokens of the row that was queued last."""
        while self._under_way and (len(self._under_way) >= RESULT_TURNS - 1 or self._under_way[0].taken):
            self._under_way.popleft().take()
        target = self._host[self._turn, :count]
        mark = self._transfers.download(target, self._results[self._turn, :count])
        tokens = DownloadedTokens(mark, target)
        self._under_way.append(tokens)
        return tokens


class DownloadedTokens:
    """On their way to host memory that is used again, so they are copied out of it."""

    vectors = None

    def __init__(self, mark: Mark, target: Tensor) -> None:
        self._mark = mark
        self._target = target
        self._token_ids: Int32Array = np.zeros(0, np.int32)
        self.taken = False

    def ready(self) -> bool:
        """Whether the copy is done."""
        return self.taken or self._mark.reached()

    def take(self) -> Int32Array:
        """Wait for them."""
        if not self.taken:
            self._mark.wait()
            self._token_ids = self._target.numpy().copy()
            self.taken = True
        return self._token_ids
