"""`SlotStates`: the running requests as arrays, one element per slot, so that a step handles all of them at once.

Knows nothing about blocks beyond how many tokens they hold, and nothing about budgets.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagemill.engine.grammar import Grammar
from pagemill.engine.request import Request, RequestStatus
from pagemill.engine.scheduler.limits import IntArray
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NO_TOKEN, Int32Array

BoolArray = npt.NDArray[np.bool_]

NUM_STOP_IDS = 8
"""Width of the array of stop ids; requests with as many or more keep all in a set. What is left of a row is filled with
NO_TOKEN, so that whoever looks for stop ids finds slots that sampled nothing too."""


class SlotStates:
    """Arrays are [S] and int64 unless said otherwise; S slots, of which `running` lists those in use.

    A slot's `epoch` grows whenever its request leaves it, so that what is still in flight for that request can be
    told from what belongs to the next one; and when what is in flight for the slot is void for another reason.
    """

    def __init__(self, num_slots: int, max_recent: int) -> None:
        """`max_recent`: most single tokens that a slot gets here before `flush` moves them."""
        # Single tokens follow what `append_several` leaves, which is no more than the first half.
        self._width = 2 * max_recent
        self.requests: list[Request | None] = [None] * num_slots
        self.request_ids = np.full(num_slots, None, dtype=object)
        self.running: IntArray = np.zeros(0, np.int64)
        """[R] slots in use, in order of admission."""
        self.num_known = np.zeros(num_slots, np.int64)
        """Tokens of prompt and output."""
        self.num_expected = np.zeros(num_slots, np.int64)
        """num_known plus the tokens that steps in flight will sample; at most, where they verify drafts."""
        self.num_computed = np.zeros(num_slots, np.int64)
        """Tokens computed by the end of the last scheduled step; at most, where drafts are still being verified."""
        self.num_drafts = np.zeros(num_slots, np.int64)
        """Drafts that the slot's next step may verify."""
        self.any_drafts = False
        """Whether a slot may have drafts, so that nobody looks where there are none."""
        self.grammars: dict[int, Grammar] = {}
        """Slot -> what restricts its output."""
        self.capacity = np.zeros(num_slots, np.int64)
        """Tokens that the allocated blocks hold."""
        self.next_commit = np.zeros(num_slots, np.int64)
        """Known and computed tokens at which another block is full."""
        self.length_limit = np.zeros(num_slots, np.int64)
        self.stop_from = np.zeros(num_slots, np.int64)
        """Known tokens from which on a stop id counts (min_tokens)."""
        self.stop_ids = np.full((num_slots, NUM_STOP_IDS), NO_TOKEN, np.int64)
        self.many_stop_ids: dict[int, frozenset[int]] = {}
        """Slot -> all stop ids, for requests that have NUM_STOP_IDS or more."""
        self.unannounced = np.zeros(num_slots, bool)
        """Whether no output of the request was reported yet."""
        self.yields = np.zeros(num_slots, bool)
        """Whether the request gives way to the first completion of another call: it is not the first of its own, and
        runs for more than its prompt."""
        self.epoch = np.zeros(num_slots, np.int64)
        self._recent = np.zeros(num_slots * self._width, np.int32)
        """The slots' newest tokens: those of slot s begin at s * self._width."""
        self._next_recent = np.arange(num_slots) * self._width
        """Where a slot's next token goes."""
        self._max_recent = max_recent
        self.in_use = np.zeros(num_slots, bool)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots not in use."""
        return len(self._free)

    def assign(self, request: Request, num_computed: int) -> int:
        """Give a request a slot, with the state of a request of which `num_computed` tokens are computed."""
        slot = self._free.pop()
        known = request.num_tokens
        request.slot = slot
        request.status = RequestStatus.RUNNING
        self.requests[slot] = request
        self.request_ids[slot] = request.request_id
        self.in_use[slot] = True
        self.running = np.append(self.running, slot)
        self.num_known[slot] = self.num_expected[slot] = known
        self.num_computed[slot] = num_computed
        self.capacity[slot] = self.next_commit[slot] = self.num_drafts[slot] = 0
        if request.grammar is not None:
            self.grammars[slot] = request.grammar
        self.length_limit[slot] = request.length_limit
        self.unannounced[slot] = not request.announced
        self.yields[slot] = request.rank > 0 and not isinstance(request.params, PoolingParams)
        self._next_recent[slot] = slot * self._width
        self._set_stops(slot, request)
        return slot

    def release(self, slots: list[int]) -> None:
        """Take slots from their requests, whose newest tokens are moved to them first."""
        for slot in slots:
            request = self.occupant(slot)
            self.flush(slot)
            request.slot = None
            request.announced = not self.unannounced[slot]
            request.scores_prompt = request.scores_prompt and not request.announced
            self.requests[slot] = None
            self.request_ids[slot] = None
            self.many_stop_ids.pop(slot, None)
            self.grammars.pop(slot, None)
            self.in_use[slot] = False
            self.epoch[slot] += 1
        self._free += reversed(slots)
        self.running = self.running[self.in_use[self.running]]

    def occupant(self, slot: int) -> Request:
        """The request of a slot in use. Raises RuntimeError for any other."""
        request = self.requests[slot]
        if request is None:
            raise RuntimeError(f"slot {slot} is not in use")
        return request

    def append(self, slots: IntArray | slice, token_ids: IntArray | Int32Array) -> None:
        """One token for each of [L] slots."""
        self._recent[self._next_recent[slots]] = token_ids
        self._next_recent[slots] += 1
        self.num_known[slots] += 1

    def append_several(self, slots: IntArray, counts: IntArray, token_ids: IntArray) -> None:
        """[L] slots, and as many tokens for each as [L] `counts` says, slot after slot."""
        for slot in slots[self._next_recent[slots] + counts > slots * self._width + self._max_recent].tolist():
            self.flush(slot)
        ends = np.cumsum(counts)
        if (counts > self._max_recent).any():
            for slot, count, end in zip(slots.tolist(), counts.tolist(), ends.tolist(), strict=True):
                self.extend(slot, token_ids[end - count : end].tolist())
            return
        places = np.repeat(self._next_recent[slots] - (ends - counts), counts) + np.arange(len(token_ids))
        self._recent[places] = token_ids
        self._next_recent[slots] += counts
        self.num_known[slots] += counts

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Any number of tokens for one slot."""
        self.flush(slot).token_ids.extend(token_ids)
        self.num_known[slot] += len(token_ids)

    def force(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Tokens of one slot that nobody sampled. Nothing counts that steps in flight sample for the slot, nor what
        they compute beyond its first `num_computed` tokens: not those that were not known until now."""
        self.epoch[slot] += 1
        self.num_computed[slot] = min(self.num_computed[slot], num_computed)
        self.num_drafts[slot] = 0
        self.extend(slot, token_ids)
        self.num_expected[slot] = self.num_known[slot]

    def draft_room(self, slots: IntArray, granted: IntArray) -> IntArray:
        """[R] tokens that a slot may run in addition to those granted, if these reach its last expected token; none
        where a grammar must see a token in flight before it can say which drafts may follow."""
        end = self.num_computed[slots] + granted
        room: IntArray = np.where(end == self.num_expected[slots], self.length_limit[slots] - 1 - end, 0)
        if self.grammars:
            room[(self.num_expected[slots] > self.num_known[slots]) & np.isin(slots, list(self.grammars))] = 0
        return room

    def surely_computed(self, slots: IntArray, num_computed: IntArray) -> IntArray:
        """[R] tokens that stay computed whatever becomes of drafts in flight, of [R] that may be."""
        if not self.any_drafts:
            return num_computed
        # A step in flight that samples computes all tokens known now; without one, nothing is uncertain.
        certain: IntArray = np.minimum(num_computed, self.num_known[slots])
        return certain

    def grammar_waits(self, slots: IntArray) -> BoolArray:
        """[R] whether a slot's grammar must see a token that is in flight before more of them are worth computing:
        what it forces would make them void."""
        waits: BoolArray = self.num_expected[slots] - self.num_known[slots] > 1
        return waits & np.isin(slots, list(self.grammars)) if waits.any() else waits

    def settle(self, slots: IntArray, most: IntArray, counts: IntArray) -> None:
        """A step that might have sampled `most` tokens for [L] slots has sampled `counts`: so many fewer are expected,
        and computed."""
        missing = most - counts
        self.num_expected[slots] -= missing
        self.num_computed[slots] -= missing

    def flush(self, slot: int) -> Request:
        """Move a slot's newest tokens to its request; the request."""
        request = self.occupant(slot)
        begin = slot * self._width
        end = int(self._next_recent[slot])
        if end > begin:
            request.token_ids.frombytes(self._recent[begin:end].tobytes())
            self._next_recent[slot] = begin
        return request

    def _set_stops(self, slot: int, request: Request) -> None:
        params = request.params
        self.stop_ids[slot] = NO_TOKEN
        if not isinstance(params, SamplingParams):
            return
        stop_ids = params.stop_token_ids or ()
        self.stop_from[slot] = request.num_prompt_tokens + params.min_tokens
        if len(stop_ids) < NUM_STOP_IDS:
            self.stop_ids[slot, : len(stop_ids)] = stop_ids
        else:
            self.many_stop_ids[slot] = frozenset(stop_ids)
