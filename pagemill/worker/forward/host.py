"""`HostForward`: each step is gathered, computed and sampled when the call returns; one pipeline stage of several, or
all of the model. Knows no graphs and no queue; on a device it waits for every step."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pagemill.messages.pending import Ready
from pagemill.messages.step import Int32Array, KnownTokens, NewRequest
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.model.models.causal_lm import CausalLM
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.batch.input_batch import InputBatch, SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.forward.interface import Forward, SampledTokens
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.native.decode_path import NativeDecode
from pagemill.worker.pipeline.stage import Stage
from pagemill.worker.sampling.sampler import Sampler


class HostForward(Forward):
    """Arrays of the batch become tensors as they are; `device`: where the model is; `network`: its forward pass,
    compiled or not; `native`: all of a decode step as one call, where it accepts it."""

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
    ) -> None:
        self._native = native
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

    def add(self, new: NewRequest) -> None:
        self._sampler.add(new)

    def remove(self, slot: int) -> None:
        self._sampler.remove(slot)

    def replace(self, known: KnownTokens) -> None:
        self._sampler.replace(known)

    def decode(self, slots: Int32Array, num_tokens: Int32Array) -> Int32Array | None:
        reason = self._native.accepts(slots, num_tokens)
        if reason is not None:
            self._native.report(reason)
            return None
        tokens = self._native.run()
        if self._sampler.active:
            self._sample_processed(slots, tokens)
        return tokens

    def run(self, batch: InputBatch) -> None:
        positions = on_device(batch.positions, self._device)
        with torch.inference_mode(), forward_context(ForwardContext(self._groups.plan(batch))):
            inputs = self._stage.receive(batch)
            hidden = self._network(inputs if self._on_host else inputs.to(self._device), positions, *self._asked(batch))
            self._rows = self._stage.pass_on(batch, hidden)

    def sample(self, batch: InputBatch) -> Ready[SampledTokens]:
        if self._rows is None:
            raise RuntimeError("sample was called without a batch that was run")
        rows, self._rows = self._rows, None
        with torch.inference_mode():
            logits = self._model.compute_logits(rows)
            tokens: Int32Array = self._sampler.sample(logits if self._on_host else logits.cpu(), batch.sampled)
        return Ready(SampledTokens(tokens))

    def _sample_processed(self, slots: Int32Array, tokens: Int32Array) -> None:
        """Complete a native step, which leaves out rows whose logits a request wants changed: [R] its slots, and the
        tokens that they sampled, which are changed in place."""
        which = np.flatnonzero(self._states.processed[slots])
        if not len(which):
            return
        rows = SampledRows(slots[which], self._states.num_tokens[slots[which]].astype(np.int64))
        with torch.inference_mode():
            tokens[which] = self._sampler.sample(self._native.logits(which), rows)
        self._states.append(rows.slots, tokens[which])

    def _asked(self, batch: InputBatch) -> tuple[Tensor, ...]:
        """The rows that are sampled from, where the network is to leave out what only others need."""
        # Not every layer takes no rows at all.
        if not self._asks_rows or not 0 < len(batch.logits_index) < batch.num_tokens:
            return ()
        return (on_device(batch.logits_index, self._device),)
