"""`PoolingForward`: the network and the pooler, for one batch after another; one pipeline stage of several, or all of
the model. Knows no graphs and no queue; on a device it waits for every step."""

import numpy as np
import torch

from pagemill.messages.pending import Ready
from pagemill.messages.step import NewRequest
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.model.models.causal_lm import CausalLM
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.forward.interface import Forward, SampledTokens
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.pipeline.stage import Stage
from pagemill.worker.pooling.pooler import Pooled, Pooler


class PoolingForward(Forward):
    """Vectors instead of tokens. `device`: where the model is. Other stages get zeros for tokens, so that a step is to
    them as any other."""

    def __init__(
        self, model: CausalLM, groups: AttentionGroups, pooler: Pooler, stage: Stage, device: torch.device
    ) -> None:
        self._model = model
        self._groups = groups
        self._pooler = pooler
        self._stage = stage
        self._device = device
        self._pooled: Pooled | None = None

    def add(self, new: NewRequest) -> None:
        self._pooler.add(new)

    def remove(self, slot: int) -> None:
        self._pooler.remove(slot)

    def run(self, batch: InputBatch) -> None:
        positions = torch.from_numpy(batch.positions).to(self._device)
        context = ForwardContext(self._groups.plan(batch), token_types=self._pooler.token_types(batch))
        with torch.inference_mode(), forward_context(context):
            hidden = self._model(self._stage.receive(batch).to(self._device), positions)
            self._stage.pass_on(batch, hidden)
            if self._stage.samples:
                self._pooled = self._pooler.pool(batch, hidden)

    def sample(self, batch: InputBatch) -> Ready[SampledTokens]:
        if self._pooled is None:
            raise RuntimeError("sample was called without a batch that was run")
        pooled = self._pooled
        self._pooled = None
        tokens = np.zeros(len(batch.sampled_slots), np.int32)
        return Ready(SampledTokens(tokens, pooled.rows.cpu().numpy(), row_counts=pooled.counts))
