"""`HostForward`: each step is gathered, computed and sampled when the call returns; one pipeline stage of several, or
all of the model. Knows no graphs and no queue; on a device it waits for every step."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagemill.messages.pending import Ready
from pagemill.messages.step import Int32Array, NewRequest
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.model.kernels.decode_step import DecodeStep
from pagemill.model.models.causal_lm import CausalLM
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.forward.interface import Forward, SampledTokens
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.pipeline.stage import Stage
from pagemill.worker.sampling.sampler import Sampler


class HostForward(Forward):
    """Arrays of the batch become tensors as they are; `device`: where the model is; `network`: its forward pass,
    compiled or not; `decode_step`: all of a decode step natively, where there is such a form of it."""

    def __init__(
        self,
        model: CausalLM,
        network: Callable[..., Tensor],
        groups: AttentionGroups,
        sampler: Sampler,
        stage: Stage,
        device: torch.device,
        decode_step: DecodeStep | None = None,
    ) -> None:
        self._decode_step = decode_step
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

    def decode(self, slots: Int32Array, num_tokens: Int32Array) -> Int32Array | None:
        if self._decode_step is None or self._sampler.active:
            return None
        return self._decode_step.run(slots, num_tokens)

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
            tokens: Int32Array = self._sampler.sample(logits if self._on_host else logits.cpu(), batch)
        return Ready(SampledTokens(tokens))

    def _asked(self, batch: InputBatch) -> tuple[Tensor, ...]:
        """The rows that are sampled from, where the network is to leave out what only others need."""
        # Not every layer takes no rows at all.
        if not self._asks_rows or not 0 < len(batch.logits_index) < batch.num_tokens:
            return ()
        return (on_device(batch.logits_index, self._device),)
