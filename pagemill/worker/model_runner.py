"""`ModelRunner`: one step, from the scheduler's arrays to sampled tokens. No feature logic; the parts do the work."""

from collections.abc import Iterable, Iterator

import numpy as np

from pagemill.messages.pending import Pending, Ready
from pagemill.messages.step import Int32Array, KnownTokens, ModelRunnerOutput, SchedulerOutput
from pagemill.worker.batch.block_tables import BlockTables
from pagemill.worker.batch.buffers import UploadRing
from pagemill.worker.batch.input_batch import InputBatch, build_batch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.forward.interface import Forward, SampledTokens
from pagemill.worker.pipeline.stage import Stage


class ModelRunner:
    """Owns the slots' state and runs steps in pairs of `execute_model` and `sample_tokens`."""

    def __init__(self, states: RequestStates, tables: BlockTables, stage: Stage, forward: Forward) -> None:
        self._states = states
        self._tables = tables
        self._stage = stage
        self._forward = forward
        self._executed: InputBatch | Ready[ModelRunnerOutput] | None = None
        self._newest: StepTokens | None = None
        """The last output, where it may not be there yet."""

    def execute_model(self, step: SchedulerOutput) -> None:
        """Apply the changes of slots, build the batch, run the network; keep the rows to be sampled, or the tokens of a
        step that is one piece of work."""
        if self._executed is not None:
            raise RuntimeError("execute_model was called before the last step was sampled")
        self._apply(step)
        token_ids = self._forward.decode(step.slots, step.num_tokens)
        if token_ids is not None:
            self._executed = Ready(ModelRunnerOutput(step.step_id, step.slots, token_ids))
            return
        self._stage.settle(step.slots)
        batch = build_batch(step, self._states)
        self._forward.run(batch)
        self._states.advance(step.slots, step.num_tokens)
        self._executed = batch

    def sample_tokens(self) -> Pending[ModelRunnerOutput]:
        """Sample the rows that the last step kept. The slots count the tokens from now on, and have them when they are
        taken. A stage that does not sample returns an output without tokens."""
        if self._executed is None:
            raise RuntimeError("sample_tokens was called without a step to sample")
        batch, self._executed = self._executed, None
        if isinstance(batch, Ready):
            return batch
        slots = batch.sampled_slots
        if not self._stage.samples:
            if len(slots):
                self._stage.expect(batch)
            slots = slots[:0]
        tokens = self._forward.sample(batch) if len(slots) else Ready(SampledTokens(slots))
        output = StepTokens(batch.step_id, tokens, _Places(self._states, slots), self._stage, self._newest)
        if self._forward.runs_ahead:
            self._newest = output
        else:
            output.result()
        return output

    @property
    def num_graphs(self) -> int:
        """Graphs that there may be in the end."""
        return self._forward.num_graphs

    @property
    def uploads(self) -> UploadRing | None:
        """What is sent to the device ahead of its work; None where nothing is."""
        return self._forward.uploads

    def rehearse(self, steps: Iterable[SchedulerOutput]) -> Iterator[None]:
        """Run the steps one by one, and what `capture_at_start` would capture, while kernels are compiled instead of
        launched. What steps sample is good for nothing from then on. Only where steps run ahead: others look at the
        tokens."""
        if not self._forward.runs_ahead:
            return
        for step in steps:
            self.execute_model(step)
            self.sample_tokens().result()
            yield
        self._forward.rehearse()
        yield

    def run_largest(self) -> None:
        """Take the memory of what steps may need beside the largest batches. No request has a slot."""
        self._forward.run_largest()

    def capture_at_start(self) -> None:
        """Capture what must be there before the first request. No request has a slot."""
        self._forward.capture_at_start()

    def capture_one(self) -> bool:
        """Capture one more, while no request has a slot; False when all are."""
        return self._forward.capture_one()

    def close(self) -> None:
        """Finish the exchange with other stages. The last call."""
        self._stage.close()

    def _apply(self, step: SchedulerOutput) -> None:
        for slot in step.released:
            self._forward.remove(slot)
        for new in step.new:
            self._states.add(new)
            self._tables.reset(new.slot, new.block_ids)
            self._stage.restart(new.slot)
            self._forward.add(new)
        for grown in step.grown:
            self._tables.append(grown.slot, grown.block_ids)
        for known in step.known:
            self._replace(known)

    def _replace(self, known: KnownTokens) -> None:
        states, slot = self._states, known.slot
        if states.num_computed[slot] < known.position:
            # What was sampled before is still to be computed: the host must have it, on every rank.
            self._stage.settle(np.array([slot], np.int32))
            if self._newest is not None:
                self._newest.result()
        states.replace(known)
        self._stage.restart(slot)
        self._forward.replace(known)


class _Places:
    """Where the tokens of a step go, in the slots as they are now."""

    def __init__(self, states: RequestStates, slots: Int32Array) -> None:
        self.slots = slots
        self._states = states
        self._positions = states.expect(slots)
        self._generation = states.generation[slots]

    def fill(self, token_ids: Int32Array) -> None:
        """The tokens, for slots that still expect them."""
        here = self._states.generation[self.slots] == self._generation
        if here.all():
            self._states.fill(self.slots, self._positions, token_ids)
        else:
            self._states.fill(self.slots[here], self._positions[here], token_ids[here])


class StepTokens:
    """The `Pending` output of a step; that of the step before it, where it is not there yet, comes first."""

    def __init__(
        self,
        step_id: int,
        tokens: Pending[SampledTokens],
        places: _Places,
        stage: Stage,
        before: "StepTokens | None" = None,
    ) -> None:
        self._before = before
        self._step_id = step_id
        self._tokens = tokens
        self._places = places
        self._stage = stage
        self._output: ModelRunnerOutput | None = None

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._output is not None or self._tokens.ready()

    def result(self) -> ModelRunnerOutput:
        """The tokens, which the slots have now too."""
        if self._output is None:
            if self._before is not None:
                self._before.result()
                self._before = None
            sampled = self._tokens.result()
            token_ids = sampled.token_ids
            if len(token_ids):
                self._places.fill(token_ids)
                self._stage.sampled(token_ids)
            self._output = ModelRunnerOutput(self._step_id, self._places.slots, token_ids, sampled.vectors)
        return self._output
