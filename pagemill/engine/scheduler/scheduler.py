"""`Scheduler`: decides what runs in each step, and follows what became of it.

Knows nothing about tensors, text, processes or how a step is executed.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from pagemill.engine.extensions.host import EngineExtensions
from pagemill.engine.extensions.interface import EngineContext
from pagemill.engine.grammar import Grammar
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.request import Request, RequestStatus
from pagemill.engine.scheduler.admission import Admission
from pagemill.engine.scheduler.draft_tally import DraftTally
from pagemill.engine.scheduler.grammars import begin_output, follow_grammars
from pagemill.engine.scheduler.limits import IntArray, SchedulerLimits, share_budget, share_drafts, token_limits
from pagemill.engine.scheduler.queues import make_queue
from pagemill.engine.scheduler.sampling_call import SamplingCall
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.engine.scheduler.steady import SteadyBatch
from pagemill.engine.scheduler.step_builder import StepBuilder
from pagemill.engine.scheduler.update import (
    FINISHED_STATUS,
    POOLED,
    BoolArray,
    SlotTokens,
    apply_tokens,
    check_counts,
    drafts_by_slot,
    logprobs_by_slot,
    note_known_logprobs,
    report,
    report_pooled,
)
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, Finish, FinishReason
from pagemill.messages.stats import SchedulerStats
from pagemill.messages.step import Drafts, Int32Array, KnownTokens, ModelRunnerOutput, SchedulerOutput, SlotBlocks

GrammarOf = Callable[[EngineCoreRequest], Grammar | None]


def no_grammar(core_request: EngineCoreRequest) -> Grammar | None:
    """Every output is free."""
    return None


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A scheduled step whose tokens are not known yet."""

    step_id: int
    slots: IntArray
    """[L] slots that sample."""
    epochs: IntArray
    """[L] their epochs; a slot whose epoch changed meanwhile lost its request."""
    num_tokens: int
    """Tokens that it computes."""
    steady: SteadyBatch | None = None
    """What it was made by, if it only goes on with that."""
    most: IntArray | None = None
    """[L] tokens that each slot may get, where some verify drafts; None: one each."""


class Scheduler:
    """There is no prefill or decode phase: a request has known and computed tokens, and a step closes the gap.

    Running requests come first, then waiting ones, within one budget of tokens. The count of computed tokens grows
    when a step is scheduled, the tokens arrive with `update`; up to `depth` steps may be in flight in between.
    """

    def __init__(
        self, limits: SchedulerLimits, kv: KVCacheManager, *, depth: int = 1, grammar_of: GrammarOf = no_grammar
    ) -> None:
        """`grammar_of`: what restricts the output of a request, if anything does."""
        self._limits = limits
        self._grammar_of = grammar_of
        self._kv = kv
        self._depth = depth
        self._token_limits = token_limits(limits)
        # A slot's tokens are moved to its request whenever a block is full.
        self._states = SlotStates(limits.max_num_seqs, kv.granularity + depth)
        elsewhere = depth > 1
        context = EngineContext(kv, self._states.occupant, limits.max_num_seqs, elsewhere)
        self._extensions = EngineExtensions.load(context)
        self.sampling = SamplingCall(self._extensions, self._states, early=not elsewhere)
        """What goes to the workers with the call that samples the step that was scheduled last."""
        self._waiting = make_queue(limits.policy)
        self._admission = Admission(limits, kv, self._states, self._waiting)
        self._requests: dict[str, Request] = {}
        self.request_ids = self._requests.keys()
        """Of requests that wait or run, always those of now."""
        self._in_flight: deque[StepInFlight] = deque()
        self._steady: SteadyBatch | None = None
        self._unmoved: tuple[Request, IntArray] | None = None
        """A first completion and the slots that ran when nobody was found to give way to it. The slots are another
        array as soon as a request starts or ends: until then, nobody needs to look again."""
        self._released: list[int] = []
        self._known: list[KnownTokens] = []
        self._unreported: list[EngineCoreOutput] = []
        self._next_step_id = 0
        self._num_added = 0
        self._num_preemptions = 0
        self._draft_tally = DraftTally(limits.num_drafts)

    # --- requests -------------------------------------------------------------------------------------------------

    def add(self, core_request: EngineCoreRequest) -> None:
        """Queue a request. One that cannot run ends at once, with an output that says why.

        Raises ValueError for an id that is in use: there would be no telling whose output is whose.
        """
        request_id = core_request.request_id
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r} is in use")
        try:
            request = Request(
                core_request,
                sequence=self._num_added,
                max_model_len=self._limits.max_model_len,
                grammar=self._grammar_of(core_request),
            )
        except (OverflowError, TypeError, ValueError) as error:
            self._unreported.append(_failure(request_id, error))
            return
        if request.num_tokens >= request.length_limit:
            self._unreported.append(EngineCoreOutput(request_id=request_id, finish=Finish(FinishReason.LENGTH)))
            return
        finish = begin_output(request, self._limits)
        if finish is not None:
            forced = EngineCoreOutput(request_id=request_id, new_token_ids=request.forced.token_ids, finish=finish)
            self._unreported.append(forced)
            return
        self._num_added += 1
        self._requests[request_id] = request
        self._waiting.push(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; their blocks and slots are free when this returns. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is None:
                continue
            if request.slot is None:
                self._waiting.remove(request)
            else:
                self._release([request.slot])
            request.status = RequestStatus.FINISHED_ABORTED
        if self._unreported:
            self._unreported = [output for output in self._unreported if output.request_id not in request_ids]

    def has_work(self) -> bool:
        """Whether any request is unfinished, any step in flight, or any end unreported."""
        return bool(self._requests or self._in_flight or self._unreported)

    def take_unreported(self) -> list[EngineCoreOutput]:
        """Ends of requests that no step produced."""
        taken, self._unreported = self._unreported, []
        return taken

    def stats(self) -> SchedulerStats:
        """What runs and waits now, and how full the cache is."""
        return SchedulerStats(
            num_running=len(self._states.running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self._kv.usage(),
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._admission.num_prefix_queries,
            prefix_cache_hits=self._admission.num_prefix_hits,
            drafts=self._draft_tally.counts,
        )

    # --- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None when nothing can run. Raises RuntimeError when `depth` steps are in flight already."""
        if len(self._in_flight) >= self._depth:
            raise RuntimeError(f"{self._depth} steps are in flight already")
        if self._steady is not None and self._steady.goes_on and not len(self._waiting):
            return self._repeat(self._steady)
        self._kv.begin_step()
        step = StepBuilder(self._next_step_id, self._limits.max_num_batched_tokens)
        yielded = len(self._waiting) and self._yield_to_first()
        preempted = self._continue_running(step)
        if not preempted and len(self._waiting):
            for request, error in self._admission.admit(step, firsts_only=bool(yielded)):
                self._fail_waiting(request, error)
        return self._dispatch(step)

    def update(self, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Apply the sampled tokens of the oldest step in flight. Raises RuntimeError when they are another's."""
        flight = self._match(output)
        steady = flight.steady
        if output.known_logprobs:
            note_known_logprobs(self._requests, output.known_logprobs)
        if output.verified is not None:
            self._draft_tally.add(output.verified, output.counts)
        plain = output.counts is None and output.drafts is None and output.answers is None and output.logprobs is None
        states = self._states
        finished: dict[int, Finish] = {}
        drafts = None
        if steady is not None and steady is self._steady and plain and steady.append(output.token_ids):
            if not states.grammars:
                return self._outputs(flight, steady.request_ids, output.token_ids.tolist())
            new = SlotTokens(steady.slots, output.token_ids.astype(np.int64))
        else:
            live = states.epoch[flight.slots] == flight.epochs
            if output.answers is not None:
                self._extensions.receive(output.answers, flight.slots, live)
            if output.vectors is not None:
                return self._update_pooled(flight, live, output.vectors, output.row_counts)
            new, finished = self._applied(flight, output, live)
            drafts = self._note_drafts(flight, output.drafts, live) if output.drafts or states.any_drafts else None
        if states.grammars:
            new, known = follow_grammars(states, new, finished, drafts, self._limits)
            if known:
                self._steady = None
                self._known += known
        drafted = drafts_by_slot(flight.slots, output)
        rows = report(states, new, finished, logprobs_by_slot(flight.slots, output), drafted)
        if finished:
            self._finish(new.slots, finished)
        return self._outputs(flight, rows.request_ids, rows.token_ids, rows.outputs)

    def check_integrity(self) -> None:
        """Raise when blocks, slots and requests contradict each other."""
        self._kv.check_integrity()
        running = [self._states.occupant(slot) for slot in self._states.running.tolist()]
        holders = {request_id for manager in self._kv.managers for request_id in manager.tables()}
        ids = [request.request_id for request in running]
        if (
            len(set(ids)) != len(ids)
            or set(ids) != holders
            or len(ids) + self._states.num_free != len(self._states.requests)
        ):
            raise RuntimeError(f"running {ids}, holding blocks {sorted(holders)}, {self._states.num_free} slots free")
        if len(running) + len(self._waiting) != len(self._requests):
            raise RuntimeError(f"{len(running)} run, {len(self._waiting)} wait, of {len(self._requests)}")

    # --- running requests -----------------------------------------------------------------------------------------

    def _continue_running(self, step: StepBuilder) -> bool:
        """Give running requests their tokens and blocks. Returns whether any of them had to give way."""
        states = self._states
        slots = states.running
        if not slots.size:
            return False
        computed = states.num_computed[slots]
        wanted = states.num_expected[slots] - computed
        for limit in self._token_limits:
            wanted = limit(wanted, computed, states.length_limit[slots])
        if states.grammars:
            wanted[states.grammar_waits(slots)] = 0
        granted = share_budget(wanted, step.budget_left)
        if states.any_drafts:
            room = states.draft_room(slots, granted)
            granted = granted + share_drafts(states.num_drafts[slots], room, step.budget_left - int(granted.sum()))
        if not granted.all():
            runs = granted > 0
            slots, computed, granted = slots[runs], computed[runs], granted[runs]
        target = computed + granted
        short = target + self._limits.lookahead > states.capacity[slots]
        grown: list[SlotBlocks] = []
        preempted = False
        if short.any():
            num_preemptions = self._num_preemptions
            surely = states.surely_computed(slots[short], computed[short])
            grown = self._grow(slots[short].tolist(), surely.tolist(), target[short].tolist())
            preempted = self._num_preemptions > num_preemptions
        if preempted:
            kept = states.in_use[slots]
            slots, computed, granted, target = slots[kept], computed[kept], granted[kept], target[kept]
        states.num_computed[slots] = target
        self._commit_full_blocks(slots, states.surely_computed(slots, computed), target)
        step.run(slots, granted, grown)
        return preempted

    def _grow(self, slots: list[int], computed: list[int], targets: list[int]) -> list[SlotBlocks]:
        """Blocks for slots that need them; when there are none left, the last in order give way, one by one."""
        states = self._states
        kv = self._kv
        grown = []
        victims: list[Request] | None = None
        for slot, num_computed, target in zip(slots, computed, targets, strict=True):
            request = states.requests[slot]
            if request is None:
                continue
            ahead = min(target + self._limits.lookahead, self._limits.max_model_len)
            block_ids = kv.grow(request, num_computed, ahead) if ahead > target else None
            if block_ids is not None:  # as long as nobody has to give way
                target = ahead
            else:
                block_ids = kv.grow(request, num_computed, target)
            while block_ids is None:
                if victims is None:
                    victims = self._waiting.victims(states.occupant(other) for other in states.running.tolist())
                victim = victims.pop()
                self._preempt(victim)
                if victim is request:
                    break
                block_ids = kv.grow(request, num_computed, target)
            else:
                grown.append(SlotBlocks(slot, block_ids))
                states.capacity[slot] = kv.capacity(target)
        return grown if victims is None else [blocks for blocks in grown if states.in_use[blocks.slot]]

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks and slot; it waits for its turn again, and will be computed anew."""
        if request.slot is None:
            raise RuntimeError(f"{request} is to be preempted, but does not run")
        self._release([request.slot])
        request.status = RequestStatus.PREEMPTED
        self._waiting.push(request)
        self._num_preemptions += 1

    def _yield_to_first(self) -> bool:
        """A later completion of some call gives way to the first one of another that finds no slot or no blocks: so
        nobody waits for the end of a call with thousands of them. One gives way in a step."""
        first = self._waiting.peek()
        if first.rank or not self._admission.is_stuck(first):
            return False
        states = self._states
        unmoved = self._unmoved
        if unmoved is not None and unmoved[0] is first and unmoved[1] is states.running:
            return False
        if states.yields[states.running].any():
            victim = self._waiting.last(states.occupant(slot) for slot in states.running.tolist())
            if states.yields[victim.slot] and self._waiting.precedes(first, victim):
                self._preempt(victim)
                return True
        self._unmoved = first, states.running
        return False

    def _commit_full_blocks(self, slots: IntArray, computed: IntArray, target: IntArray) -> None:
        """Share the blocks that this step fills, as far as all their tokens are known."""
        states = self._states
        kv = self._kv
        ready = np.minimum(target, states.num_known[slots])
        due = ready >= states.next_commit[slots]
        if not due.any():
            return
        slots, ready = slots[due], ready[due]
        states.next_commit[slots] = (ready // kv.granularity + 1) * kv.granularity
        for slot, before, tokens in zip(slots.tolist(), computed[due].tolist(), ready.tolist(), strict=True):
            request = states.flush(slot)
            kv.commit(request, tokens)
            kv.drop_out_of_window(request, before)

    def _fail_waiting(self, request: Request, error: Exception) -> None:
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED_ERROR
        self._unreported.append(_failure(request.request_id, error))

    # --- steps in flight ------------------------------------------------------------------------------------------

    def _dispatch(self, step: StepBuilder) -> SchedulerOutput | None:
        """Close a step: whoever reaches its last known token in it will sample another."""
        slots, num_tokens = step.arrays()
        if not slots.size:
            return None
        states = self._states
        expected = states.num_expected[slots]
        computed = states.num_computed[slots]
        samples = computed >= expected
        # One token each, and one for every draft; these are what is computed beyond the tokens that are expected.
        most = np.where(samples, computed - expected + 1, 0) if states.any_drafts else None
        if most is not None and (most <= 1).all():
            most = None
        states.num_expected[slots] = expected + (samples if most is None else most)
        sampled = slots[samples]
        only_decodes = len(sampled) == len(slots) == int(num_tokens.sum())
        repeats = only_decodes and len(slots) == len(states.running) and not self._extensions.join_every_step(slots)
        # With more steps in flight, those with a grammar do not run in every step.
        repeats = repeats and (self._depth <= 2 or not states.grammars)
        self._steady = SteadyBatch.of(states, slots) if repeats else None
        self._in_flight.append(
            StepInFlight(
                self._next_step_id,
                sampled,
                states.epoch[sampled],
                int(num_tokens.sum()),
                most=None if most is None else most[samples],
            )
        )
        self._next_step_id += 1
        released, self._released = self._released, []
        known, self._known = self._known, []
        message = step.finish(slots, num_tokens, released, known)
        payloads = self._extensions.payloads(message, sampled)
        self.sampling.begin(sampled)
        return message if payloads is None else replace(message, extensions=payloads)

    def _repeat(self, steady: SteadyBatch) -> SchedulerOutput:
        """The step before once more, where nothing else is due."""
        steady.schedule()
        step_id = self._next_step_id
        self._next_step_id += 1
        self._in_flight.append(StepInFlight(step_id, steady.slots, steady.epochs, len(steady.slots), steady))
        self.sampling.repeat()
        return SchedulerOutput(step_id, steady.slots32, steady.ones)

    def _match(self, output: ModelRunnerOutput) -> StepInFlight:
        """The step of an output."""
        if not self._in_flight:
            raise RuntimeError(f"tokens of step {output.step_id} arrived, and no step is in flight")
        flight = self._in_flight.popleft()
        known = flight.steady is not None and output.slots is flight.steady.slots32
        if output.step_id != flight.step_id or not (known or np.array_equal(output.slots, flight.slots)):
            raise RuntimeError(
                f"step {flight.step_id} samples slots {flight.slots.tolist()}; the workers returned step "
                f"{output.step_id}, slots {output.slots.tolist()}"
            )
        if output.counts is not None:
            check_counts(output.counts, 1, 1 if flight.most is None else flight.most, len(output.token_ids))
        if output.drafts is not None:
            check_counts(output.drafts.counts, 0, self._limits.max_model_len, len(output.drafts.token_ids))
        return flight

    def _applied(
        self, flight: StepInFlight, output: ModelRunnerOutput, live: BoolArray
    ) -> tuple[SlotTokens, dict[int, Finish]]:
        """Append the tokens of a step's slots, without those whose request is gone; no more are expected of the step.
        Returns what was appended, and position in it -> why that request ends."""
        counts = output.counts
        if counts is None and flight.most is not None:
            counts = np.ones(len(flight.slots), np.int32)
        wide = None if counts is None else counts.astype(np.int64)
        new = SlotTokens(flight.slots, output.token_ids.astype(np.int64), wide).rows(live)
        if flight.most is not None and new.counts is not None:
            self._states.settle(new.slots, flight.most[live], new.counts)
        new, finished = apply_tokens(self._states, new)
        if output.counts is not None:
            # Blocks that accepted drafts filled: the next step may let go of them, as it reads later ones. Those of
            # requests that end are shared when these are released.
            goes_on = np.delete(new.slots, list(finished)) if finished else new.slots
            computed = self._states.num_known[goes_on] - 1
            self._commit_full_blocks(goes_on, computed, computed)
        return new, finished

    def _note_drafts(self, flight: StepInFlight, drafts: Drafts | None, live: BoolArray) -> SlotTokens | None:
        """What the slots of a step may verify next."""
        states = self._states
        self._steady = None
        found = None
        if drafts is not None:
            given = SlotTokens(flight.slots, drafts.token_ids.astype(np.int64), drafts.counts.astype(np.int64))
            found = given.rows(live)
        states.num_drafts[flight.slots[live]] = 0 if found is None or found.counts is None else found.counts
        states.any_drafts = bool(states.num_drafts.any()) or any(other.most is not None for other in self._in_flight)
        return found

    def _outputs(
        self,
        flight: StepInFlight,
        request_ids: list[str],
        token_ids: list[int],
        outputs: Sequence[EngineCoreOutput] = (),
    ) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            request_ids=request_ids,
            token_ids=token_ids,
            outputs=[*outputs],
            stats=self._stats_of_step(),
            step_at=time.monotonic(),
            num_step_tokens=flight.num_tokens,
        )

    def _update_pooled(
        self, flight: StepInFlight, live: BoolArray, vectors: npt.NDArray[np.float32], counts: Int32Array | None
    ) -> EngineCoreOutputs:
        """`update` for prompts that became vectors; all of them end."""
        slots = flight.slots[live]
        of_slots = list(vectors) if counts is None else np.split(vectors, np.cumsum(counts)[:-1])
        outputs = report_pooled(self._states, slots, [of_slots[row] for row in np.flatnonzero(live)])
        self._finish(slots, {row: output.finish or POOLED for row, output in enumerate(outputs)})
        return self._outputs(flight, [], [], outputs)

    def _stats_of_step(self) -> SchedulerStats:
        """State now, and the residency of blocks that was sampled since the last step."""
        stats = self.stats()
        samples = self._kv.take_residency()
        return stats if samples is None else msgspec.structs.replace(stats, residency=samples)

    def _finish(self, slots: IntArray, finished: dict[int, Finish]) -> None:
        ended = [int(slots[row]) for row in finished]
        for slot, finish in zip(ended, finished.values(), strict=True):
            request = self._states.occupant(slot)
            request.status = FINISHED_STATUS[finish.reason]
            del self._requests[request.request_id]
            if finish.reason is FinishReason.ERROR:
                # Nor are its last blocks shared when they are let go of.
                self._kv.discredit(request)
                self._states.num_computed[slot] = 0
        self._release(ended)

    def _release(self, slots: Sequence[int]) -> None:
        """Free the blocks and the slots of running requests; the workers hear of it with the next step."""
        self._steady = None
        if self._known:
            self._known = [known for known in self._known if known.slot not in slots]
        states = self._states
        for slot in slots:
            request = states.flush(slot)
            computed = min(int(states.num_computed[slot]), request.num_tokens)
            if computed >= states.next_commit[slot]:  # tokens that came after the last step was scheduled
                self._kv.commit(request, computed)
            self._kv.free(request, computed)
        states.release(list(slots))
        self._released += slots


def _failure(request_id: str, error: Exception) -> EngineCoreOutput:
    return EngineCoreOutput.failed(request_id, f"{type(error).__name__}: {error}")
