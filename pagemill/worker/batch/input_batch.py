"""`InputBatch`: one step as arrays, gathered from the slots; the only argument that features share."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.messages.step import Int32Array, SchedulerOutput
from pagemill.worker.batch.request_states import RequestStates

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of logits, by whose they are. L rows."""

    slots: Int32Array
    """[L] the request slots that they belong to."""
    positions: Int64Array
    """[L] position in its request of the token to be sampled: as many tokens are known."""

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, which: Int64Array | slice) -> "SampledRows":
        """Some of them."""
        return SampledRows(self.slots[which], self.positions[which])


class SlotRows(NamedTuple):
    """The rows of L slots that sample, which follow one another."""

    slots: Int32Array
    """[L] each once."""
    starts: npt.NDArray[np.integer]
    """[L] the first row of each."""
    counts: npt.NDArray[np.integer]
    """[L] rows of each: one, and one for every draft that it verifies."""

    @classmethod
    def of(cls, sampled_slots: Int32Array) -> "SlotRows":
        """By the slot of each row."""
        starts = np.flatnonzero(sampled_slots[1:] != sampled_slots[:-1]) + 1
        starts = np.concatenate(([0], starts)) if len(sampled_slots) else starts
        return cls(sampled_slots[starts], starts, np.diff(starts, append=len(sampled_slots)))


@dataclass(frozen=True, slots=True)
class InputBatch:
    """A flat batch: the tokens of all requests one after another (T tokens, R requests, L rows sampled)."""

    step_id: int
    slots: Int32Array
    """[R] request slots in batch order."""
    token_slots: Int32Array
    """[T] the request slot of each token."""
    token_ids: Int64Array
    """[T]."""
    positions: Int64Array
    """[T] position of each token in its request."""
    query_start: Int32Array
    """[R + 1] exclusive prefix sum of tokens per request."""
    seq_lens: Int32Array
    """[R] tokens computed before plus tokens of this step."""
    logits_index: Int64Array
    """[L] rows of the hidden states from which a token is sampled."""
    sampled_slots: Int32Array
    """[L] the request slots that they belong to; each once, and once more for every draft that it verifies."""
    sampled_positions: Int64Array
    """[L] position in its request of the token to be sampled."""
    guessed: Int32Array | None = None
    """[L] where the draft that follows a row is among the guesses on the device, which the host does not know yet; -1:
    it knows the draft, or there is none. None: it knows all."""
    known_rows: SlotRows | None = None
    """Of the slots that sample, where who has made the batch knows them."""

    @property
    def slot_rows(self) -> SlotRows:
        """Of the slots that sample."""
        return SlotRows.of(self.sampled_slots) if self.known_rows is None else self.known_rows

    @property
    def verifies(self) -> bool:
        """Whether a slot has several rows that are sampled from."""
        if self.known_rows is not None:
            return len(self.sampled_slots) > len(self.known_rows.slots)
        return bool((self.sampled_slots[1:] == self.sampled_slots[:-1]).any())

    @property
    def sampled(self) -> SampledRows:
        """The rows from which a token is sampled."""
        return SampledRows(self.sampled_slots, self.sampled_positions)

    @property
    def num_drafts(self) -> Int64Array | None:
        """[R] drafts that each request verifies; None: nobody does."""
        slots = self.sampled_slots
        if not (slots[1:] == slots[:-1]).any():
            return None
        rows = np.bincount(slots, minlength=int(self.slots.max()) + 1)
        return np.maximum(rows[self.slots] - 1, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, T."""
        return len(self.token_ids)

    @property
    def max_query_len(self) -> int:
        """Most tokens of a request."""
        return int((self.query_start[1:] - self.query_start[:-1]).max())

    @property
    def max_seq_len(self) -> int:
        """The longest request of the batch, in tokens."""
        return int(self.seq_lens.max())


def build_batch(step: SchedulerOutput, states: RequestStates, num_tokens: Int32Array | None = None) -> InputBatch:
    """Gather a step. A request samples when the step reaches its last known token; a prefill chunk does not.

    `num_tokens`: [R] the tokens that each slot runs, where some may verify drafts, which lie behind their own tokens in
    the state; None: those of the step, and nobody does.
    """
    counts = step.num_tokens if num_tokens is None else num_tokens
    return gather_batch(step.step_id, step.slots, counts, states, verifies=num_tokens is not None)


def gather_batch(
    step_id: int, slots: Int32Array, counts: Int32Array, states: RequestStates, *, verifies: bool
) -> InputBatch:
    """A step of [R] slots, which run so many tokens each. `verifies`: some of them may be drafts."""
    computed = states.num_computed[slots]
    known = states.num_tokens[slots]
    if verifies and (computed == known - 1).all():
        return _gather_going_on(step_id, slots, counts, states, computed)
    seq_lens = computed + counts
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    if (counts == 1).all():
        token_slots = slots
        positions = computed.astype(np.int64)
    else:
        token_slots = np.repeat(slots, counts)
        starts = np.repeat(computed - query_start[:-1], counts)
        positions = starts.astype(np.int64) + np.arange(len(token_slots))
    samples = seq_lens >= known
    last_rows = (query_start[1:][samples] - 1).astype(np.int64)
    sampled_slots = slots[samples]
    sampled_positions = seq_lens[samples].astype(np.int64)
    if verifies and (seq_lens > known).any():
        rows = (seq_lens - known + 1)[samples]
        back = np.repeat(np.cumsum(rows), rows) - np.arange(rows.sum()) - 1
        last_rows = np.repeat(last_rows, rows) - back
        sampled_slots = np.repeat(sampled_slots, rows)
        sampled_positions = np.repeat(sampled_positions, rows) - back
    return InputBatch(
        step_id=step_id,
        slots=slots,
        token_slots=token_slots,
        token_ids=states.token_ids[token_slots, positions].astype(np.int64),
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens,
        logits_index=last_rows,
        sampled_slots=sampled_slots,
        sampled_positions=sampled_positions,
    )


def _gather_going_on(
    step_id: int, slots: Int32Array, counts: Int32Array, states: RequestStates, computed: Int32Array
) -> InputBatch:
    """A step in which all slots go on, with drafts or without: every row is sampled from."""
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.add.accumulate(counts, out=query_start[1:])
    starts = query_start[:-1]
    rows = np.arange(query_start[-1], dtype=np.int64)
    if len(slots) == 1:
        slot, start, count = int(slots[0]), int(computed[0]), len(rows)
        token_slots = slots.repeat(count)
        positions = rows + start
        token_ids = states.token_ids[slot, start : start + count]
    else:
        token_slots = slots.repeat(counts)
        positions = rows + (computed - starts).repeat(counts)
        token_ids = states.token_ids[token_slots, positions]
    return InputBatch(
        step_id=step_id,
        slots=slots,
        token_slots=token_slots,
        token_ids=token_ids.astype(np.int64),
        positions=positions,
        query_start=query_start,
        seq_lens=computed + counts,
        logits_index=rows,
        sampled_slots=token_slots,
        sampled_positions=positions + 1,
        known_rows=SlotRows(slots, starts, counts),
    )
