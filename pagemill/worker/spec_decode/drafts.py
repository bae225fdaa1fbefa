"""`SlotDrafts`: the drafts of slots, from the proposer that guesses them to the step that verifies them.

A draft is accepted where the model samples the same token with the noise of its position: so the tokens are those that
would be sampled one by one. Drafts lie behind the tokens of their slot in `RequestStates.token_ids`.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagemill.log import get_logger
from pagemill.messages.pending import Pending, Ready
from pagemill.messages.step import Drafts, Int32Array, KnownTokens, NewRequest, SampledLogprobs, SchedulerOutput
from pagemill.model.attention.state_layer import StateLayer
from pagemill.model.distributed.group import Group, SoloGroup
from pagemill.worker.batch.input_batch import InputBatch, SlotRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.spec_decode.adaptive import AdaptiveCounts
from pagemill.worker.spec_decode.chain import sound_drafts
from pagemill.worker.spec_decode.interface import GuessSteps, Proposer, Speculation

logger = get_logger(__name__)


class Verified(NamedTuple):
    """What slots sampled in one step."""

    slots: Int32Array
    """[L] each once."""
    token_ids: Int32Array
    """[N] slot after slot: drafts that were accepted, and one token more."""
    counts: Int32Array | None
    """[L] tokens of each slot; None: one each."""
    rows: SlotRows
    """From which they were sampled."""
    num_drafts: Int32Array | None
    """[L] drafts that each slot had; None: none."""

    def kept_logprobs(self, found: SampledLogprobs) -> SampledLogprobs:
        """Those of the tokens that are kept, of those of all that were sampled."""
        counts = np.ones_like(self.rows.counts) if self.counts is None else self.counts
        kept = kept_rows(self.rows, counts)
        which = np.flatnonzero(kept[found.indices])
        places = np.cumsum(kept, dtype=np.int32) - 1
        return SampledLogprobs(places[found.indices[which]], found.logprobs.rows(which))


def kept_rows(rows: SlotRows, counts: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """[rows] which are among the first `counts` [L] of their slot."""
    kept: npt.NDArray[np.bool_] = np.arange(rows.counts.sum()) < (rows.starts + counts).repeat(rows.counts)
    return kept


class FoundDrafts(NamedTuple):
    """`Pending` drafts of [L] slots, which have them already."""

    counts: Int32Array
    found: Sequence[Int32Array]

    def ready(self) -> bool:
        """Always: a proposer on the host has found them."""
        return True

    def result(self) -> Drafts:
        """The drafts of all slots as one message."""
        return Drafts(self.counts, np.concatenate(self.found, dtype=np.int32))


class Stopwatch:
    """Adds up the time between `start` and `stop`, or inside a `with`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None

    def start(self) -> None:
        """Count the time from now on."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Count no further; nothing where it was not started."""
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None

    def take(self) -> float:
        """Seconds since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


class GuessedDrafts:
    """`Pending` drafts of [L] slots, which a device has guessed. The next step may verify them before they are on the
    host: it finds them on the device."""

    def __init__(
        self, states: RequestStates, slots: Int32Array, counts: Int32Array, width: int, guessed: Pending[Int32Array]
    ) -> None:
        """`counts`: [L] drafts that each slot has; `guessed`: [L, width]."""
        self._states = states
        self._slots = slots
        self._counts = counts
        self._known = states.num_tokens[slots]
        self._width = width
        self._guessed = guessed
        self._drafts: Drafts | None = None

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._drafts is not None or self._guessed.ready()

    def result(self) -> Drafts:
        """The drafts, which the slots have from now on; 0 in place of what is no token."""
        if self._drafts is None:
            found = np.maximum(self._guessed.result(), 0)
            token_ids = self._states.token_ids
            rows = zip(self._slots.tolist(), self._known.tolist(), self._counts.tolist(), found, strict=True)
            for slot, start, count, row in rows:
                token_ids[slot, start : start + count] = row[:count]
            kept = np.arange(self._width) < self._counts[:, None]
            self._drafts = Drafts(self._counts, found[kept])
        return self._drafts

    def rows(self, batch: InputBatch) -> Int32Array | None:
        """[L] of a batch: where the draft that follows each row is among all of [slots, width]; -1: nowhere. None: no
        draft of the batch is."""
        of_batch = batch.known_rows
        if of_batch is not None and np.array_equal(of_batch.slots, self._slots):
            starts, counts = of_batch.starts, of_batch.counts
            if len(batch.sampled_slots) == len(starts):
                return None
            firsts = np.arange(0, len(starts) * self._width, self._width) - starts
            found: Int32Array = (np.arange(len(batch.sampled_slots)) + firsts.repeat(counts)).astype(np.int32)
            found[starts + counts - 1] = -1
            return found
        of_slot = np.full(len(self._states.num_tokens), -1, np.int32)
        of_slot[self._slots] = np.arange(len(self._slots))
        rows = of_slot[batch.sampled_slots]
        goes_on = np.append(batch.sampled_slots[1:] == batch.sampled_slots[:-1], False) & (rows >= 0)
        if not goes_on.any():
            return None
        places = batch.sampled_positions - self._known[rows]
        return np.where(goes_on, rows * self._width + places, -1).astype(np.int32)


class SlotDrafts:
    """Owns the drafts of all slots, as many as `speculation` says at most. `ranks`: those of the replica, who must all
    have the same drafts though their clocks differ. `state_layers`: those that must be told which
    tokens of a step stay."""

    def __init__(
        self,
        states: RequestStates,
        proposer: Proposer,
        speculation: Speculation,
        ranks: Group | None = None,
        vocab_size: int | None = None,
        state_layers: Sequence[StateLayer] = (),
        steps: GuessSteps | None = None,
    ) -> None:
        """`steps`: graphs of who proposes."""
        self._states = states
        self._proposer = proposer
        self.reads_tables = proposer.computes
        """Whether who proposes reads block tables, which may not change before it has."""
        self._max_drafts = speculation.max_drafts
        self._disabled_from = speculation.disable_by_batch_size
        self._only_native = speculation.by_default
        self._adaptive = AdaptiveCounts(states, speculation.max_drafts) if speculation.adaptive else None
        self._ranks = ranks or SoloGroup()
        self._vocab_size = vocab_size
        self._state_layers = state_layers
        self._steps = steps
        self._said_invalid = False
        self.guessed: GuessedDrafts | None = None
        """Those that may not be on the host yet."""
        self._counts = np.zeros(len(states.num_tokens), np.int32)
        """[S] drafts of each slot."""
        self._running = np.zeros(0, np.int32)
        """[R] drafts of the slots of the step that runs, which may be a batch with tokens of prompts: less than 0."""
        self.clock = Stopwatch()
        """Around what a step computes, in one part or several; `computed` says which step it was."""

    def begin(self, new: NewRequest) -> None:
        """A slot has another request, or one again that was preempted."""
        self._counts[new.slot] = 0
        self._proposer.begin(new)
        if self._adaptive is not None:
            self._adaptive.begin(new.slot)

    def replace(self, known: KnownTokens) -> None:
        """Tokens of a slot are others now."""
        self._counts[known.slot] = 0
        self._proposer.replace(known.slot, known.position)
        if self._adaptive is not None:
            self._adaptive.replace(known.slot)

    def end(self, slot: int) -> None:
        """The slot's request ended or was preempted, and its tokens are still there."""
        self._proposer.end(slot)

    @property
    def num_graphs(self) -> int:
        """Graphs of who proposes."""
        return 0 if self._steps is None else self._steps.num_graphs

    def capture_at_start(self) -> None:
        """Prepare what must be there before the first request. No request has a slot."""
        if self._steps is not None:
            self._steps.capture_at_start()

    def num_tokens(self, step: SchedulerOutput) -> Int32Array:
        """[R] tokens that each slot of a step runs: its own, and as many drafts as it has and the step has room for."""
        states = self._states
        slots = step.slots
        own = states.num_tokens[slots] - states.num_computed[slots]
        counts: Int32Array = np.minimum(step.num_tokens, own + self._counts[slots])
        self._running = counts - own
        return counts

    def computed(self, num_tokens: int, num_rows: int) -> None:
        """A step of so many tokens is done, and so many of them are sampled from. One with others, of prompts, says
        nothing of what drafts cost."""
        seconds = self.clock.take()
        if self._adaptive is None or self._adaptive.paused or num_tokens != num_rows:
            return  # of steps in which nobody is asked, those between tell as much
        if self._ranks.size > 1:
            seconds = float(self._ranks.all_reduce(torch.tensor([seconds], dtype=torch.float32))[0])
        self._adaptive.costs.add(num_tokens, seconds)

    def decoded(self, slots: Int32Array, counts: Int32Array | None, num_tokens: int) -> Int32Array | None:
        """A step of so many tokens, which was one native call, sampled for [R] slots; [R] `counts` tokens, None: one
        each. The slots have them already. [R] the drafts that each verified; None: there were none."""
        if counts is None:
            self.computed(num_tokens, len(slots))
            return None
        num_drafts = self._running
        self.computed(num_tokens, len(slots) + int(num_drafts.sum()))
        if self._adaptive is not None:
            self._adaptive.verified(slots, num_drafts, counts - 1)
        return num_drafts

    def verify(self, batch: InputBatch, sampled: Int32Array, counts: Int32Array | None = None) -> Verified:
        """Which drafts of a batch hold: [L] rows of the batch and the tokens that they sampled; `counts`: how many of
        them each slot gets, where somebody else has compared. The slots have the tokens from now on, and count as
        computed what was computed of them."""
        self.know()
        rows = batch.slot_rows
        counts = self._num_right(batch, rows, sampled) if counts is None else counts.astype(np.int32, copy=False)
        slots = rows.slots
        token_ids = self._take_tokens(batch, rows, sampled, counts)
        states = self._states
        num_tokens = states.num_tokens[slots] + counts
        states.num_tokens[slots] = num_tokens
        states.num_computed[slots] = num_tokens - 1
        states.num_sampled[slots] += counts
        some = len(sampled) > len(slots)
        if self._state_layers and some:
            kept_of_slot = np.zeros(len(states.num_tokens), np.int64)
            kept_of_slot[slots] = counts
            num_kept = torch.from_numpy(kept_of_slot[batch.slots])
            for layer in self._state_layers:
                layer.keep(num_kept)
        num_drafts = (rows.counts - 1).astype(np.int32, copy=False) if some else None
        if self._adaptive is not None and num_drafts is not None:
            self._adaptive.verified(slots, num_drafts, counts - 1)
        return Verified(slots, token_ids, None if len(token_ids) == len(slots) else counts, rows, num_drafts)

    def _num_right(self, batch: InputBatch, rows: SlotRows, sampled: Int32Array) -> Int32Array:
        """[L] tokens that each slot gets: the drafts that are what its rows sampled, and one more."""
        if not len(rows.slots):
            return rows.slots
        ends = sampled != self._states.token_ids[batch.sampled_slots, batch.sampled_positions]
        ends[rows.starts + rows.counts - 1] = True
        first_end = np.minimum.reduceat(np.where(ends, np.arange(len(sampled)), len(sampled)), rows.starts)
        found: Int32Array = (first_end - rows.starts + 1).astype(np.int32)
        return found

    def _take_tokens(
        self, batch: InputBatch, rows: SlotRows, sampled: Int32Array, counts: Int32Array
    ) -> npt.NDArray[np.int32]:
        """The first `counts` [L] tokens of each slot, which it has from now on."""
        states = self._states
        if len(rows.slots) == 1:
            count, position = int(counts[0]), int(batch.sampled_positions[0])
            token_ids = sampled[:count]
            states.token_ids[int(rows.slots[0]), position : position + count] = np.maximum(token_ids, 0)
            return token_ids
        if len(sampled) == len(rows.slots):
            states.fill(batch.sampled_slots, batch.sampled_positions, sampled)
            return sampled
        kept = kept_rows(rows, counts)
        token_ids = sampled[kept]
        states.fill(batch.sampled_slots[kept], batch.sampled_positions[kept], token_ids)
        return token_ids

    def goes_on(self, slots: Int32Array) -> bool:
        """Whether drafts of all these [R] slots, which verify some in a step that is under way, are wanted whatever it
        samples, and there is room for them."""
        if self._steps is None or (self._disabled_from is not None and len(slots) >= self._disabled_from):
            return False
        if self._adaptive is not None and not self._adaptive.asks_all(slots):
            return False
        return self._steps.has_room(slots, self._states.num_computed[slots])

    def know(self) -> None:
        """Wait for drafts that a device has guessed: the slots have them from now on."""
        if self.guessed is not None:
            self.guessed.result()
            self.guessed = None

    def propose(self, slots: Int32Array, computed: Int32Array | None = None) -> Drafts | None:
        """Drafts of [L] slots that have sampled, in place of those they had; None where there are none. `computed`: [R]
        all slots of the step; None: no others. A model's guesses are part of what the next step takes."""
        found = self.propose_early(slots, computed)
        return None if found is None else found.result()

    def propose_early(self, slots: Int32Array, computed: Int32Array | None = None) -> FoundDrafts | None:
        """As `propose`, but for the message, which nobody needs before the next step."""
        with self.clock if self._proposer.computes else nullcontext():
            asks = self._asks(slots)
            self._proposer.is_asked = asks
            self._proposer.follow(slots if computed is None else computed)
            return self._propose(slots) if asks else None

    def take_guesses(self, slots: Int32Array, guessed: Pending[Int32Array]) -> Pending[Drafts | None]:
        """As `propose`, where a device guesses behind the step: [L, drafts], -1 from where there is none. Guesses are
        waited for only where it depends on them which are verified."""
        with self.clock if self._proposer.computes else nullcontext():
            self._proposer.went_on(slots)
            most = self._room(slots)
            counts = most if self._adaptive is None else self._adaptive.keep_all(slots, most)
            if counts is None:
                return (self._propose(slots, guessed) if self._asks(slots) else None) or Ready(None)
            self._counts[slots] = counts
            if not counts.any():
                return Ready(None)
            self.guessed = GuessedDrafts(self._states, slots, counts, self._max_drafts, guessed)
            return self.guessed

    def _room(self, slots: Int32Array) -> Int32Array:
        """[L] drafts that slots may have."""
        states = self._states
        room: Int32Array = np.minimum(states.token_ids.shape[1] - 1 - states.num_tokens[slots], self._max_drafts)
        return room

    def held(self, slots: Int32Array) -> Int32Array:
        """[L, 1 + most drafts]: how many drafts each slot has, and these, with anything behind them."""
        counts = self._counts[slots]
        known = self._states.num_tokens[slots]
        last = self._states.token_ids.shape[1] - 1
        places = np.minimum(known[:, None] + np.arange(self._max_drafts), last)
        found: Int32Array = np.column_stack((counts, self._states.token_ids[slots[:, None], places]))
        return found

    def take(self, slots: Int32Array, held: Int32Array) -> None:
        """Give slots the drafts that they have on another rank, which has told of them by `held`."""
        self._counts[slots] = held[:, 0]
        for slot, start, row in zip(slots.tolist(), self._states.num_tokens[slots].tolist(), held, strict=True):
            self._states.token_ids[slot, start : start + row[0]] = row[1 : 1 + row[0]]

    def _asks(self, slots: Int32Array) -> bool:
        """Whether drafts of slots that have sampled are wanted, as far as it is known before there are guesses; else
        they have none. To be called for each step."""
        if self._disabled_from is not None and len(slots) >= self._disabled_from:
            self._counts[slots] = 0
            return False
        return self._adaptive is None or not self._adaptive.pauses()

    def _propose(self, slots: Int32Array, guessed: Pending[Int32Array] | None = None) -> FoundDrafts | None:
        states = self._states
        known = states.num_tokens[slots]
        room = self._room(slots)
        found = self._guesses(slots, room) if guessed is None else self._taken(slots, room, guessed.result())
        counts = np.array([len(ids) for ids in found], np.int32)
        if self._adaptive is not None:
            counts = self._adaptive.choose(slots, found)
            found = [ids[:count] for ids, count in zip(found, counts.tolist(), strict=True)]
        if not counts.any() or not self._are_tokens(found):
            self._counts[slots] = 0
            return None
        for slot, start, ids in zip(slots.tolist(), known.tolist(), found, strict=True):
            states.token_ids[slot, start : start + len(ids)] = ids
        self._counts[slots] = counts
        return FoundDrafts(counts, found)

    def _are_tokens(self, found: Sequence[Int32Array]) -> bool:
        """Whether a proposer keeps to the vocabulary: others have no embedding, and a device stops at them."""
        vocab_size = self._vocab_size
        if vocab_size is None or self._proposer.repeats:
            return True
        token_ids = np.concatenate(found)
        valid = bool(token_ids.min() >= 0 and token_ids.max() < vocab_size)
        if not valid and not self._said_invalid:
            self._said_invalid = True
            logger.error(
                "the proposer of drafts gave token %d, and there are 0 to %d: drafts of such steps are left out",
                int(token_ids.max() if token_ids.min() >= 0 else token_ids.min()), vocab_size - 1,
            )  # fmt: skip
        return valid

    def _taken(self, slots: Int32Array, room: Int32Array, guessed: Int32Array) -> list[Int32Array]:
        """Of each slot, as many of its [L, drafts] guesses as it has room for."""
        if self._adaptive is not None:
            self._adaptive.due(slots)
        found = sound_drafts(np.arange(len(slots)), guessed, len(slots))
        return [ids[:most] for ids, most in zip(found, room.tolist(), strict=True)]

    def _guesses(self, slots: Int32Array, room: Int32Array) -> list[Int32Array]:
        """Of each slot, as many tokens as it has room for; none of those that need not be asked."""
        if self._adaptive is not None:
            due = self._adaptive.due(slots)
            if self._only_native:
                due &= ~self._states.processed[slots]
            if not due.all():
                found = [slots[:0]] * len(slots)
                asked = np.flatnonzero(due)
                if len(asked):
                    guesses = self._proposer.propose(slots[asked])
                    for row, ids in zip(asked.tolist(), guesses, strict=True):
                        found[row] = ids[: room[row]]
                return found
        guesses = self._proposer.propose(slots)
        return [ids[:most] for ids, most in zip(guesses, room.tolist(), strict=True)]
