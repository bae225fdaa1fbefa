"""`ModelRunner`: one step, from the scheduler's arrays to sampled tokens. No feature logic; the parts do the work."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.pending import Pending, Ready
from pagemill.messages.step import Drafts, Int32Array, KnownTokens, ModelRunnerOutput, SchedulerOutput
from pagemill.worker.batch.block_tables import BlockTables
from pagemill.worker.batch.buffers import UploadRing
from pagemill.worker.batch.input_batch import InputBatch, build_batch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.extensions.host import StepAnswersPending, WorkerExtensions
from pagemill.worker.forward.interface import Forward, SampledTokens
from pagemill.worker.native.decode_step import Decoded
from pagemill.worker.pipeline.stage import Stage
from pagemill.worker.spec_decode.drafts import SlotDrafts, Verified


class ModelRunner:
    """Owns the slots' state and runs steps in pairs of `execute_model` and `sample_tokens`."""

    def __init__(
        self,
        states: RequestStates,
        tables: BlockTables,
        stage: Stage,
        forward: Forward,
        extensions: WorkerExtensions | None = None,
        drafts: SlotDrafts | None = None,
    ) -> None:
        """`drafts`: those of the slots, where steps verify some. Which there are follows from the tokens of the step
        before, so these are waited for even where the forward runs ahead: as late as there may be, when the next step
        begins."""
        self._states = states
        self._tables = tables
        self._stage = stage
        self._forward = forward
        self._extensions = WorkerExtensions() if extensions is None else extensions
        self._drafts = drafts
        self._executed: InputBatch | _DecodedStep | None = None
        self._newest: StepTokens | VerifiedStep | None = None
        """The last output, where it may not be there yet."""

    def execute_model(self, step: SchedulerOutput) -> None:
        """Apply the changes of slots, build the batch, run the network; keep the rows to be sampled, or the tokens of a
        step that is one piece of work, as far as they are sampled."""
        if self._executed is not None:
            raise RuntimeError("execute_model was called before the last step was sampled")
        if self._drafts is None:
            self._apply(step)
            self._compute(step, step.num_tokens)
            return
        changes = bool(step.new or step.known or step.released or step.extensions is not None)
        grows_early = not changes and not self._drafts.reads_tables
        if grows_early:  # while tokens are on their way
            self._grow(step)
        if isinstance(self._newest, VerifiedStep):
            self._newest.settle()
        if changes or self._states.processed[step.slots].any():
            self._drafts.know()
        if not grows_early:
            self._apply(step)
        num_tokens = self._drafts.num_tokens(step)
        if self._forward.runs_ahead:
            self._drafts.clock.start()
            self._compute(step, num_tokens)
        else:
            with self._drafts.clock:
                self._compute(step, num_tokens)

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        """Sample the rows that the last step kept; `payloads`: what step extensions say to that. The slots count the
        tokens from now on, and have them when they are taken. A stage that does not sample returns an output without
        tokens."""
        if self._executed is None:
            raise RuntimeError("sample_tokens was called without a step to sample")
        if payloads is not None:
            self._extensions.begin_sampling(payloads)
        batch, self._executed = self._executed, None
        if isinstance(batch, _DecodedStep):
            return self._completed(Ready(self._chosen(batch)))
        if self._drafts is not None:
            return self._sample_drafted(batch, self._drafts)
        slots = batch.sampled_slots
        if not self._stage.samples:
            if len(slots):
                self._stage.expect(batch)
            slots = slots[:0]
        samples = len(slots) or self._forward.has_known_logprobs
        tokens = self._forward.sample(batch) if samples else Ready(SampledTokens(slots))
        answers = self._extensions.answers(slots)
        before = self._newest if isinstance(self._newest, StepTokens) else None
        output = StepTokens(batch.step_id, tokens, _Places(self._states, slots), self._stage, before, answers)
        if self._forward.runs_ahead:
            self._newest = output
        else:
            output.result()
        return output

    @property
    def num_graphs(self) -> int:
        """Graphs that there may be in the end."""
        return self._forward.num_graphs + (0 if self._drafts is None else self._drafts.num_graphs)

    @property
    def uploads(self) -> UploadRing | None:
        """What is sent to the device ahead of its work; None where nothing is."""
        return self._forward.uploads

    def precompile(self, steps: Iterable[SchedulerOutput]) -> Iterator[None]:
        """Run the steps one by one, and what `capture_at_start` would capture, while kernels are compiled instead of
        launched. What steps sample is good for nothing from then on. Only where steps run ahead: others look at the
        tokens."""
        if not self._forward.runs_ahead:
            return
        for step in steps:
            self.execute_model(step)
            self.sample_tokens().result()
            yield
        self._forward.precompile()
        yield

    def run_largest(self) -> None:
        """Take the memory of what steps may need beside the largest batches. No request has a slot."""
        self._forward.run_largest()

    def capture_at_start(self) -> None:
        """Capture what must be there before the first request. No request has a slot."""
        self._forward.capture_at_start()
        if self._drafts is not None:
            self._drafts.capture_at_start()

    def capture_one(self) -> bool:
        """Capture one more, while no request has a slot; False when all are."""
        return self._forward.capture_one()

    def close(self) -> None:
        """Finish the exchange with other stages. The last call."""
        self._stage.close()

    def _compute(self, step: SchedulerOutput, num_tokens: Int32Array) -> None:
        """`num_tokens`: [R] those that each slot runs, without room for drafts that there are none of."""
        decoded = self._forward.decode(step.slots, num_tokens)
        if decoded is not None:
            count = 0 if self._drafts is None else int(num_tokens.sum())
            self._executed = _DecodedStep(step.step_id, step.slots, decoded, count)
            return
        self._stage.settle(step.slots)
        batch = build_batch(step, self._states, None if self._drafts is None else num_tokens)
        guesses = None if self._drafts is None else self._drafts.guessed
        guessed = None if guesses is None else guesses.rows(batch)
        if guessed is not None:
            batch = replace(batch, guessed=guessed)
        self._forward.run(batch)
        self._states.advance(step.slots, num_tokens)
        self._executed = batch

    def _apply(self, step: SchedulerOutput) -> None:
        for slot in step.released:
            self._forward.remove(slot)
            if self._drafts is not None:
                self._drafts.end(slot)
        if step.extensions is not None:
            self._extensions.begin(step.extensions)
        for new in step.new:
            self._states.add(new)
            self._tables.reset(new.slot, new.block_ids)
            self._stage.restart(new.slot)
            self._forward.add(new)
            if self._drafts is not None:
                self._drafts.begin(new)
        self._grow(step)
        for known in step.known:
            self._replace(known)

    def _grow(self, step: SchedulerOutput) -> None:
        for grown in step.grown:
            self._tables.append(grown.slot, grown.block_ids)

    def _chosen(self, step: "_DecodedStep") -> ModelRunnerOutput:
        """What a step samples that was one piece of work."""
        drafts = self._drafts
        token_ids, counts = step.decoded
        with nullcontext() if drafts is None else drafts.clock:
            logprobs = self._forward.complete(step.slots, step.decoded)
        num_drafts = None
        if drafts is not None:
            num_drafts = drafts.decoded(step.slots, counts, step.num_tokens)
        return ModelRunnerOutput(
            step.step_id, step.slots, token_ids, counts=counts, verified=num_drafts, logprobs=logprobs
        )

    def _sample_drafted(self, batch: InputBatch, drafts: SlotDrafts) -> Pending[ModelRunnerOutput]:
        if not self._stage.samples:
            return self._followed(batch, drafts)
        if self._forward.runs_ahead:
            queued = self._sampled(batch)
            behind = self._forward.behind
            guessed = behind.guess(batch) if behind is not None and drafts.goes_on(batch.slots) else None
            self._newest = VerifiedStep(queued, partial(self._verify_late, batch, queued, guessed, drafts), guessed)
            return self._newest
        with drafts.clock:
            tokens = self._sampled(batch).result()
            done = _verified_output(batch.step_id, tokens, drafts.verify(batch, tokens.token_ids, tokens.counts))
        drafts.computed(batch.num_tokens, len(batch.sampled_slots))
        output = self._completed(Ready(done), batch.slots)
        if not self._stage.alone and len(done.slots):
            self._stage.shared(_told(tokens.token_ids, drafts.held(done.slots)))
        return output

    def _sampled(self, batch: InputBatch) -> Pending[SampledTokens]:
        samples = len(batch.sampled_slots) or self._forward.has_known_logprobs
        return self._forward.sample(batch) if samples else Ready(SampledTokens(batch.sampled_slots))

    def _verify_late(
        self,
        batch: InputBatch,
        tokens: Pending[SampledTokens],
        guessed: Pending[Int32Array] | None,
        drafts: SlotDrafts,
    ) -> Callable[[], ModelRunnerOutput]:
        """Give the slots what a step of a forward that runs ahead has sampled, and new drafts: the next step waits for
        no more than that. `guessed`: those that the device guesses behind the step. The time that a step took is that
        from one step's tokens to the next one's, where steps follow each other. Returns what makes the output."""
        sampled = tokens.result()
        verified = drafts.verify(batch, sampled.token_ids, sampled.counts)
        drafts.clock.stop()
        drafts.computed(batch.num_tokens, len(batch.sampled_slots))
        proposed: Pending[Drafts | None]
        if guessed is None:
            proposed = drafts.propose_early(verified.slots, batch.slots) or Ready(None)
        else:
            proposed = drafts.take_guesses(verified.slots, guessed)
        answers = self._extensions.answers(verified.slots)
        return partial(_verified_output, batch.step_id, sampled, verified, proposed, answers)

    def _followed(self, batch: InputBatch, drafts: SlotDrafts) -> Ready[ModelRunnerOutput]:
        """The output of a step that another stage samples: nothing. The slots have what that stage has given them."""
        num_rows = len(batch.sampled_slots)
        if num_rows:
            slots = np.unique(batch.sampled_slots)
            told = self._stage.shared(_told(np.zeros(num_rows, np.int32), drafts.held(slots)))
            verified = drafts.verify(batch, told[:num_rows])
            drafts.take(verified.slots, told[num_rows:].reshape(len(slots), -1))
        nobody = batch.sampled_slots[:0]
        answers = self._extensions.answers(nobody)
        told_of = None if answers is None else answers.result()
        return Ready(ModelRunnerOutput(batch.step_id, nobody, nobody, answers=told_of))

    def _completed(
        self, done: Ready[ModelRunnerOutput], computed: Int32Array | None = None
    ) -> Ready[ModelRunnerOutput]:
        """The output of a step whose tokens the slots have, with new drafts and with what extensions answer.
        `computed`: [R] all slots of the step, where some of them may not have sampled."""
        output = done.result()
        drafts = None if self._drafts is None else self._drafts.propose(output.slots, computed)
        answers = self._extensions.answers(output.slots)
        if drafts is None and answers is None:
            return done
        return Ready(replace(output, drafts=drafts, answers=None if answers is None else answers.result()))

    def _replace(self, known: KnownTokens) -> None:
        states = self._states
        slot = known.slot
        if min(states.num_computed[slot], known.num_computed) < known.position:
            # What was sampled before is still to be computed: the host must have it, on every rank.
            self._stage.settle(np.array([slot], np.int32))
            if self._newest is not None:
                self._newest.result()
        states.replace(known)
        self._stage.restart(slot)
        self._forward.replace(known)
        if self._drafts is not None:
            self._drafts.replace(known)


@dataclass(frozen=True, slots=True)
class _DecodedStep:
    """A step that was one piece of work."""

    step_id: int
    slots: Int32Array
    decoded: Decoded
    """Tokens of slots that are `processed` are yet to be sampled."""
    num_tokens: int
    """That were computed, where there may be drafts."""


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


def _verified_output(
    step_id: int,
    sampled: SampledTokens,
    verified: Verified,
    drafts: Pending[Drafts | None] | None = None,
    answers: StepAnswersPending | None = None,
) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        step_id,
        verified.slots,
        verified.token_ids,
        counts=verified.counts,
        verified=verified.num_drafts,
        drafts=None if drafts is None else drafts.result(),
        answers=None if answers is None else answers.result(),
        logprobs=None if sampled.logprobs is None else verified.kept_logprobs(sampled.logprobs),
        known_logprobs=sampled.known_logprobs,
    )


def _told(sampled: Int32Array, held: Int32Array) -> Int32Array:
    """What a stage that samples tells the others: [L] tokens of all rows, then the drafts of the slots."""
    return np.concatenate((sampled, held.ravel()), dtype=np.int32)


class VerifiedStep:
    """The `Pending` output of a step in which slots may verify drafts, on a device. `settle` comes before the next step
    begins: the slots then have the tokens, and new drafts."""

    def __init__(
        self,
        tokens: Pending[SampledTokens],
        settle: Callable[[], Callable[[], ModelRunnerOutput]],
        guessed: Pending[Int32Array] | None = None,
    ) -> None:
        """`guessed`: drafts on their way to the host, for which `settle` may not wait."""
        self._tokens = tokens
        self._guessed = guessed
        self._settle = settle
        self._make: Callable[[], ModelRunnerOutput] | None = None
        self._output: ModelRunnerOutput | None = None

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        drafts = self._guessed is None or self._output is not None or self._guessed.ready()
        return drafts and (self._make is not None or self._tokens.ready())

    def settle(self) -> Callable[[], ModelRunnerOutput]:
        """Wait for the tokens, once; returns what makes the output."""
        if self._make is None:
            self._make = self._settle()
        return self._make

    def result(self) -> ModelRunnerOutput:
        """What the step sampled, and the drafts of the next one."""
        if self._output is None:
            self._output = self.settle()()
        return self._output


class StepTokens:
    """The `Pending` output of a step; that of the step before it, where it is not there yet, comes first."""

    def __init__(
        self,
        step_id: int,
        tokens: Pending[SampledTokens],
        places: _Places,
        stage: Stage,
        before: "StepTokens | None" = None,
        answers: StepAnswersPending | None = None,
    ) -> None:
        self._before = before
        self._step_id = step_id
        self._tokens = tokens
        self._places = places
        self._stage = stage
        self._answers = answers
        self._output: ModelRunnerOutput | None = None

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        if self._output is not None:
            return True
        return self._tokens.ready() and (self._answers is None or self._answers.ready())

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
            answers = None if self._answers is None else self._answers.result()
            self._output = ModelRunnerOutput(
                self._step_id,
                self._places.slots,
                token_ids,
                sampled.vectors,
                sampled.row_counts,
                answers=answers,
                logprobs=sampled.logprobs,
                known_logprobs=sampled.known_logprobs,
            )
        return self._output
