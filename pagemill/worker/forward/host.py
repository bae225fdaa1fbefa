"""`HostForward`: each step is gathered, computed and sampled when the call returns; one pipeline stage of several, or
all of the model. Knows no graphs and no queue; on a device it waits for every step."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pagemill.messages.pending import Ready
from pagemill.messages.step import Int32Array, KnownTokens, NewRequest, SampledLogprobs
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.model.models.causal_lm import CausalLM
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.batch.input_batch import InputBatch, SampledRows, gather_batch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.batch.row_masks import LEFT
from pagemill.worker.forward.interface import Forward, SampledTokens
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.native.decode_path import NativeDecode
from pagemill.worker.native.decode_step import Decoded
from pagemill.worker.pipeline.stage import Stage
from pagemill.worker.sampling.logprobs import KnownValues
from pagemill.worker.sampling.sampler import Sampler
from pagemill.worker.spec_decode.hidden_states import HiddenStates


class HostForward(Forward):
    """Arrays of the batch become tensors as they are; `device`: where the model is; `network`: its forward pass,
    compiled or not; `native`: all of a decode step as one call, where it accepts it; `hidden`: where somebody reads
    hidden states."""

    def __init__(
        self,
        model: CausalLM,
        network: Callable[..., Tensor],
        groups: AttentionGroups,
        states: RequestStates,
        sampler: Sampler,
        stage: Stage,
        device: torch.device,
        native: NativeDecode,
        hidden: HiddenStates | None = None,
    ) -> None:
        self._native = native
        self._hidden = hidden
        if hidden is not None and (hidden.wanted.sampled or hidden.wanted.final):
            native.store_hidden()
        self._computes = False
        """Whether the step that comes is a native call up to its logits."""
        self.decodes_natively = native.possible
        self._states = states
        self._model = model
        self._network = network
        self._groups = groups
        self._sampler = sampler
        self._stage = stage
        self._device = device
        self._on_host = device.type == "cpu"
        # A stage passes on all rows, and what is compiled has one shape for a number of tokens.
        self._asks_rows = isinstance(network, CausalLM) and network.is_first and network.is_last
        self._rows: Tensor | None = None
        self._logits: Tensor | None = None
        """Of a step that was a native call up to there."""
        self._known_values: list[KnownValues] = []

    def add(self, new: NewRequest) -> None:
        self._sampler.add(new)

    def remove(self, slot: int) -> None:
        self._sampler.remove(slot)

    def replace(self, known: KnownTokens) -> None:
        self._sampler.replace(known)

    def decode(self, slots: Int32Array, num_tokens: Int32Array) -> Decoded | None:
        reason = self._native.accepts(slots, num_tokens)
        if not self._native.computes:
            if reason is not None:
                self._native.report(reason)
            return None
        hidden, draws = self._hidden, self._sampler.draft_draws
        scores = self._sampler.logprobs.scores(slots)
        if (reason or scores or hidden is not None or draws is not None) and (num_tokens > 1).any():
            # Hidden states of all tokens may be wanted.
            reads_all = hidden is not None and not hidden.wanted.only_sampled
            if scores or (reads_all and not self._native.samples_all):
                return None
            # Native calls compare tokens that are drawn without drafts, and of nobody whose logits are changed.
            self._computes = reason is not None or draws is not None
            if self._computes:
                return None
        if hidden is None:
            return self._native.run()
        batch = gather_batch(0, slots, num_tokens, self._states, verifies=True)
        decoded = self._native.run()
        self._take_hidden(hidden, batch)
        return decoded

    def complete(self, slots: Int32Array, decoded: Decoded) -> SampledLogprobs | None:
        if not self._sampler.active:
            return None
        if decoded.counts is None:
            return self._sample_processed(slots, decoded.token_ids)
        places = np.cumsum(decoded.counts, dtype=np.int32) - decoded.counts
        tokens = decoded.token_ids[places]
        logprobs = self._sample_processed(slots, tokens)
        decoded.token_ids[places] = tokens
        return None if logprobs is None else SampledLogprobs(places[logprobs.indices], logprobs.logprobs)

    def run(self, batch: InputBatch) -> None:
        self._known_values = []
        self.has_known_logprobs = False
        if self._computes:
            self._computes = False
            self._logits = self._native.compute()
            if self._hidden is not None:
                self._take_hidden(self._hidden, batch)
            return
        positions = on_device(batch.positions, self._device)
        with torch.inference_mode(), forward_context(ForwardContext(self._groups.plan(batch))):
            inputs = self._receive(batch)
            hidden = self._network(inputs if self._on_host else inputs.to(self._device), positions, *self._asked(batch))
            if self._hidden is not None:
                hidden = self._hidden.take(hidden)
            self._rows = self._stage.pass_on(batch, hidden)
            if self._hidden is not None:
                self._hidden.batch = batch
                self._hidden.take_sampled(self._rows)
        if self._stage.samples and self._sampler.logprobs.scores(batch.slots):
            with torch.inference_mode():
                compute = self._model.compute_logits
                self._known_values = self._sampler.logprobs.score_known(batch, hidden, compute)
        self.has_known_logprobs = bool(self._known_values)

    def sample(self, batch: InputBatch) -> Ready[SampledTokens]:
        if self._logits is not None:
            given, self._logits = self._logits, None
            with torch.inference_mode():
                tokens, logprobs = self._sampler.sample_scored(given, batch.sampled)
            return Ready(SampledTokens(tokens, logprobs=logprobs))
        if self._rows is None:
            raise RuntimeError("sample was called without a batch that was run")
        rows, self._rows = self._rows, None
        with torch.inference_mode():
            tokens = np.zeros(0, np.int32)
            logprobs = None
            if len(rows):
                logits = self._model.compute_logits(rows)
                tokens, logprobs = self._sampler.sample_scored(logits if self._on_host else logits.cpu(), batch.sampled)
        prompts = tuple(part.message(part.values.packed.cpu()) for part in self._known_values)
        return Ready(SampledTokens(tokens, logprobs=logprobs, known_logprobs=prompts))

    def _sample_processed(self, slots: Int32Array, tokens: Int32Array) -> SampledLogprobs | None:
        """Complete a native step, which leaves out rows whose logits a request wants changed or told of: [R] its slots,
        and the tokens that they sampled, which are changed in place. Returns their log-probabilities."""
        processed = self._states.processed[slots]
        masks = self._sampler.masks(SampledRows(slots, self._states.num_tokens[slots].astype(np.int64)))
        if masks is not None:
            self._native.choose(masks, tokens)
            processed &= masks.rows == LEFT
        which = np.flatnonzero(processed)
        if not len(which):
            return None
        rows = SampledRows(slots[which], self._states.num_tokens[slots[which]].astype(np.int64))
        with torch.inference_mode():
            tokens[which], logprobs = self._sampler.sample_scored(self._native.logits(which), rows)
        self._states.append(rows.slots, tokens[which])
        if logprobs is None:
            return None
        return SampledLogprobs(which.astype(np.int32)[logprobs.indices], logprobs.logprobs)

    def _receive(self, batch: InputBatch) -> Tensor:
        """What the first layer here reads: token ids, or what the stage before has given."""
        hidden = self._hidden
        if hidden is None:
            return self._stage.receive(batch)
        return hidden.arrive(self._stage.receive(batch, len(hidden.arriving)))

    def _take_hidden(self, hidden: HiddenStates, batch: InputBatch) -> None:
        """Of a step that was a native call."""
        hidden.batch = batch
        result = hidden.take(self._native.hidden(batch.num_tokens))
        hidden.take_sampled(result[: len(batch.sampled_slots)])

    def _asked(self, batch: InputBatch) -> tuple[Tensor, ...]:
        """The rows that are sampled from, where the network is to leave out what only others need."""
        if self._sampler.logprobs.scores(batch.slots) or (self._hidden is not None and self._hidden.wanted.final):
            return ()
        # Not every layer takes no rows at all.
        if not self._asks_rows or not 0 < len(batch.logits_index) < batch.num_tokens:
            return ()
        return (on_device(batch.logits_index, self._device),)
