"""`ModelRunner`: one step, from the scheduler's arrays to sampled tokens. No feature logic; the parts do the work."""

import torch
from torch import Tensor

from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.model.models.causal_lm import CausalLM
from pagemill.worker.batch.block_tables import BlockTables
from pagemill.worker.batch.input_batch import InputBatch, build_batch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.pipeline.stage import Stage
from pagemill.worker.sampling.sampler import Sampler


class ModelRunner:
    """Owns the slots' state and runs steps in pairs of `execute_model` and `sample_tokens`."""

    def __init__(
        self,
        model: CausalLM,
        states: RequestStates,
        tables: BlockTables,
        groups: AttentionGroups,
        sampler: Sampler,
        stage: Stage,
    ) -> None:
        self._model = model
        self._states = states
        self._tables = tables
        self._groups = groups
        self._sampler = sampler
        self._stage = stage
        self._pending: tuple[InputBatch, Tensor] | None = None

    def execute_model(self, step: SchedulerOutput) -> None:
        """Apply the changes of slots, build the batch, run the network; keep the rows to be sampled."""
        if self._pending is not None:
            raise RuntimeError("execute_model was called before the last step was sampled")
        self._apply(step)
        self._stage.settle(step.slots)
        batch = build_batch(step, self._states)
        with torch.inference_mode(), forward_context(ForwardContext(self._groups.plan(batch))):
            hidden = self._model(self._stage.receive(batch), torch.from_numpy(batch.positions))
            rows = self._stage.pass_on(batch, hidden)
        self._states.advance(step.slots, step.num_tokens)
        self._pending = (batch, rows)

    def sample_tokens(self) -> ModelRunnerOutput:
        """Sample the rows that the last step kept, and append the tokens to their slots. A stage that does not sample
        returns an output without tokens."""
        if self._pending is None:
            raise RuntimeError("sample_tokens was called without a step to sample")
        batch, rows = self._pending
        self._pending = None
        if not len(batch.sampled_slots):
            return ModelRunnerOutput(batch.step_id, batch.sampled_slots, batch.sampled_slots)
        if not self._stage.samples:
            self._stage.expect(batch)
            return ModelRunnerOutput(batch.step_id, batch.sampled_slots[:0], batch.sampled_slots[:0])
        with torch.inference_mode():
            tokens = self._sampler.sample(self._model.compute_logits(rows), batch)
        self._states.append(batch.sampled_slots, tokens)
        self._stage.sampled(tokens)
        return ModelRunnerOutput(batch.step_id, batch.sampled_slots, tokens)

    def close(self) -> None:
        """Finish the exchange with other stages. The last call."""
        self._stage.close()

    def _apply(self, step: SchedulerOutput) -> None:
        for slot in step.released:
            self._sampler.remove(slot)
        for new in step.new:
            self._states.add(new)
            self._tables.reset(new.slot, new.block_ids)
            self._stage.add(new)
            self._sampler.add(new)
        for grown in step.grown:
            self._tables.append(grown.slot, grown.block_ids)
