"""`SlotDrafts`: the drafts of slots, from the proposer that guesses them to the step that verifies them.

A draft is accepted where the model samples the same token with the noise of its position: so the tokens are those that
would be sampled one by one. Drafts lie behind the tokens of their slot in `RequestStates.token_ids`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.messages.step import Drafts, Int32Array, KnownTokens, NewRequest, SampledLogprobs, SchedulerOutput
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.spec_decode.interface import Proposer


class Verified(NamedTuple):
    """What slots sampled in one step."""

    slots: Int32Array
    """[L] each once."""
    token_ids: Int32Array
    """[N] slot after slot: drafts that were accepted, and one token more."""
    counts: Int32Array | None
    """[L] tokens of each slot; None: one each."""
    kept: npt.NDArray[np.bool_]
    """Which of the tokens that were sampled are among them."""
    num_drafts: Int32Array | None
    """[L] drafts that each slot had; None: none."""

    def kept_logprobs(self, found: SampledLogprobs) -> SampledLogprobs:
        """Those of the tokens that are kept, of those of all that were sampled."""
        which = np.flatnonzero(self.kept[found.indices])
        places = np.cumsum(self.kept, dtype=np.int32) - 1
        return SampledLogprobs(places[found.indices[which]], found.logprobs.rows(which))


class SlotDrafts:
    """Owns the drafts of all slots. `max_drafts`: of one slot. `disabled_from`: as many slots that sample in one step
    have none; None: however many do."""

    def __init__(
        self, states: RequestStates, proposer: Proposer, max_drafts: int, disabled_from: int | None = None
    ) -> None:
        self._states = states
        self._proposer = proposer
        self._max_drafts = max_drafts
        self._disabled_from = disabled_from
        self._counts = np.zeros(len(states.num_tokens), np.int32)
        """[S] drafts of each slot."""

    def begin(self, new: NewRequest) -> None:
        """A slot has another request, or one again that was preempted."""
        self._counts[new.slot] = 0
        self._proposer.begin(new)

    def replace(self, known: KnownTokens) -> None:
        """Tokens of a slot are others now."""
        self._counts[known.slot] = 0
        self._proposer.replace(known.slot, known.position)

    def end(self, slot: int) -> None:
        """The slot's request ended or was preempted, and its tokens are still there."""
        self._proposer.end(slot)

    def num_tokens(self, step: SchedulerOutput) -> Int32Array:
        """[R] tokens that each slot of a step runs: its own, and as many drafts as it has and the step has room for."""
        states = self._states
        slots = step.slots
        own = states.num_tokens[slots] - states.num_computed[slots]
        counts: Int32Array = np.minimum(step.num_tokens, own + self._counts[slots])
        return counts

    def verify(self, batch: InputBatch, sampled: Int32Array) -> Verified:
        """Which drafts of a batch hold: [L] rows of the batch and the tokens that they sampled. The slots have the
        tokens from now on, and count as computed what was computed of them."""
        states = self._states
        rows = batch.sampled_slots
        positions = batch.sampled_positions
        starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1])[: len(rows)])
        slots = rows[starts]
        num_rows = np.diff(np.append(starts, len(rows)))
        places = np.arange(len(rows)) - np.repeat(starts, num_rows)
        ends = places == np.repeat(num_rows, num_rows) - 1
        ends |= sampled != states.token_ids[rows, positions]
        counts = np.minimum.reduceat(np.where(ends, places, len(rows)), starts) + 1 if len(rows) else num_rows
        kept = places < np.repeat(counts, num_rows)
        token_ids = sampled[kept]
        states.fill(rows[kept], positions[kept].astype(np.int32), token_ids)
        states.num_tokens[slots] += counts.astype(np.int32)
        states.num_sampled[slots] += counts.astype(np.int32)
        states.num_computed[slots] = states.num_tokens[slots] - 1
        plain = len(token_ids) == len(slots)
        num_drafts = (num_rows - 1).astype(np.int32) if len(rows) > len(slots) else None
        return Verified(slots, token_ids, None if plain else counts.astype(np.int32), kept, num_drafts)

    def propose(self, slots: Int32Array) -> Drafts | None:
        """Drafts of [L] slots that have sampled, in place of those they had; None where there are none."""
        states = self._states
        if self._disabled_from is not None and len(slots) >= self._disabled_from:
            self._counts[slots] = 0
            return None
        known = states.num_tokens[slots]
        room = np.minimum(states.token_ids.shape[1] - 1 - known, self._max_drafts)
        found = [ids[:most] for ids, most in zip(self._proposer.propose(slots), room.tolist(), strict=True)]
        for slot, start, ids in zip(slots.tolist(), known.tolist(), found, strict=True):
            states.token_ids[slot, start : start + len(ids)] = ids
        counts = np.array([len(ids) for ids in found], np.int32)
        self._counts[slots] = counts
        return Drafts(counts, np.concatenate(found).astype(np.int32)) if counts.any() else None
