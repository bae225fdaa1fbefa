"""`DraftModelProposer`: a smaller model of the same vocabulary guesses the most likely tokens, one after another.

What it keeps of a token lies in the same blocks as what the model keeps of it. Of each full block it has computed what
the model has by the end of the same step, so that its part of the block is good wherever the model's is: in blocks that
are shared, and after a request was preempted. Tokens that it guessed and that turn out to be right it need not compute
again.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.log import get_logger
from pagemill.messages.step import Int32Array, NewRequest
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.model.network.native_plan import NotPlannable
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.spec_decode.chain import NO_ROW, rooms, sound_drafts, step_batch
from pagemill.worker.spec_decode.heads import cut_drafts
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext
from pagemill.worker.spec_decode.native_draft import NativeDraft

logger = get_logger(__name__)

NO_TOKEN = -1


class DraftModelProposer(Proposer):
    """S slots. All that is learnt of a slot is how many of its tokens the draft model has computed."""

    computes = True

    def __init__(self, context: ProposerContext) -> None:
        """Raises ValueError where no model was loaded."""
        if context.network is None:
            raise ValueError("a draft model proposes, and none was loaded")
        self._network = context.network
        self._steps = context.network.follow_steps()
        self._states = context.states
        self._max_drafts = context.max_drafts
        num_slots = len(context.states.num_tokens)
        self._computed = np.zeros(num_slots, np.int32)
        """[S] first tokens of a slot that are computed, those included that were guessed and may be others now."""
        self._row = np.full(num_slots, NO_ROW, np.int32)
        """[S] the row of `_hidden` after a slot's last token; -1 where that is not computed."""
        self._shared = math.gcd(*(table.block_size for table in context.network.tables.groups))
        """Tokens after which a block of some group may be full."""
        self._hidden: Tensor | None = None
        """[L, E]."""
        self._guess = np.full(num_slots, NO_TOKEN, np.int32)
        """[S] the first guess of a slot, where a native call has made it; else NO_TOKEN."""
        self._native: NativeDraft | None = None
        try:
            self._native = NativeDraft(context.network, context.states)
        except NotPlannable as reason:
            logger.debug("steps of the draft model are batches: %s", reason)

    def begin(self, new: NewRequest) -> None:
        self._computed[new.slot] = new.num_computed_tokens
        self._row[new.slot] = NO_ROW
        self._guess[new.slot] = NO_TOKEN

    def replace(self, slot: int, position: int) -> None:
        self._computed[slot] = min(self._computed[slot], position)
        self._row[slot] = NO_ROW
        self._guess[slot] = NO_TOKEN

    def follow(self, slots: Int32Array) -> None:
        """Compute what the model has computed of the slots, and the last token of those that have sampled. On hosts,
        what nobody asks for waits until somebody does, or until a block is full, which others may share."""
        states = self._states
        self._row[slots] = NO_ROW
        self._guess[slots] = NO_TOKEN
        known = states.num_tokens[slots]
        computed = states.num_computed[slots]
        ends = np.minimum(np.where(known - computed == 1, known, computed), rooms(self._network, slots))
        # What comes after the tokens that the model has computed was guessed, and may be something else now.
        starts = np.minimum(self._computed[slots], computed)
        if not self.is_asked and self._steps is None and (starts // self._shared == computed // self._shared).all():
            self._computed[slots] = starts
            return
        self._computed[slots] = np.maximum(starts, ends)
        runs = ends > starts
        if not runs.any():
            return
        slots, starts, ends, known = slots[runs], starts[runs], ends[runs], known[runs]
        if self._native is not None and (ends == known).all():
            guesses = self._native.run(slots, starts, ends)
            if guesses is not None:
                self._guess[slots] = guesses
                return
        token_ids = np.concatenate(
            [states.token_ids[slot, start:end] for slot, start, end in zip(slots, starts, ends, strict=True)]
        )
        last = ends == known
        batch = step_batch(slots, token_ids.astype(np.int64), starts, ends, last)
        self._row[slots[last]] = np.arange(int(last.sum()))
        if self._steps is not None and self._steps.fits(batch):
            self._hidden = self._steps.follow(batch)
            return
        found = self._run(batch, on_device(batch.token_ids, self._network.device))
        self._hidden = found if self._steps is None else self._steps.place(found)

    def went_on(self, slots: Int32Array) -> None:
        self._computed[slots] = self._states.num_tokens[slots] + (self._max_drafts - 1)

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        if self._native is not None and (self._guess[slots] >= 0).any():
            return self._guess_natively(self._native, slots)
        counts = np.zeros(len(slots), np.int32)
        rows = self._row[slots]
        which = np.flatnonzero(rows != NO_ROW)
        if self._hidden is None or not len(which):
            return [slots[:0]] * len(slots)
        known = self._states.num_tokens[slots]
        # The first guess needs no place of its own, each further one that of the one before it.
        counts[which] = np.clip(rooms(self._network, slots)[which] - known[which] + 1, 1, self._max_drafts)
        steps = self._steps
        whole = steps is not None and steps.takes(len(which)) and counts[which].min() == self._max_drafts
        if steps is not None and whole and self._hidden is steps.hidden:
            asked = slots[which]
            drafts = steps.guess(asked, rows[which], known[which])
            self._computed[asked] = known[which] + (self._max_drafts - 1)
            return sound_drafts(which, drafts, len(slots))
        found: list[tuple[npt.NDArray[np.int64], Tensor, Tensor]] = []
        tokens = torch.empty(0)
        hidden = self._hidden[on_device(rows[which].astype(np.int64), self._hidden.device)]
        for place in range(int(counts.max())):
            if place:
                goes_on = counts[which] > place
                if not goes_on.all():
                    tokens = tokens[on_device(np.flatnonzero(goes_on), tokens.device)]
                    which = which[goes_on]
                hidden = self._append(slots[which], tokens, known[which] + (place - 1))
            tokens, logits = self._most_likely(hidden)
            found.append((which, tokens, logits))
        return cut_drafts(found, counts)

    def _guess_natively(self, native: NativeDraft, slots: Int32Array) -> Sequence[Int32Array]:
        """Drafts of [L] slots, of which some have a guess of the native call that followed them."""
        drafts = np.zeros((len(slots), self._max_drafts), np.int32)
        counts = np.zeros(len(slots), np.int32)
        found = self._guess[slots]
        which = np.flatnonzero(found >= 0)
        tokens = found[which]
        known = self._states.num_tokens[slots]
        room = rooms(self._network, slots)
        for place in range(self._max_drafts):
            drafts[which, place] = tokens
            counts[which] += 1
            which = which[known[which] + place < room[which]]
            if place + 1 == self._max_drafts or not len(which):
                break
            starts = known[which] + np.int32(place)
            # The guess lies behind the slot's tokens: the call that made it has put it there.
            further = native.run(slots[which], starts, starts + 1)
            if further is None:
                break
            self._computed[slots[which]] = starts + 1
            sound = further >= 0
            which, tokens = which[sound], further[sound]
        return [row[:count] for row, count in zip(drafts, counts.tolist(), strict=True)]

    def _append(self, slots: Int32Array, tokens: Tensor, starts: Int32Array) -> Tensor:
        """[L] slots, guesses and their positions -> [L, E] hidden states after them."""
        ends = starts + 1
        every = np.ones(len(slots), np.bool_)
        hidden = self._run(step_batch(slots, np.zeros(len(slots), np.int64), starts, ends, every), tokens)
        self._computed[slots] = ends
        return hidden

    def _run(self, batch: InputBatch, tokens: Tensor) -> Tensor:
        """[T] tokens of the batch -> [L, E] hidden states of its sampled rows."""
        network = self._network
        positions, rows = (on_device(array, network.device) for array in (batch.positions, batch.logits_index))
        with torch.inference_mode(), forward_context(ForwardContext(network.groups.plan(batch))):
            if 0 < len(rows) < batch.num_tokens:
                chosen: Tensor = network.model(tokens, positions, rows)
                return chosen
            hidden: Tensor = network.model(tokens, positions)
            return hidden[rows]

    def _most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[L, E] -> [L] tokens, int64, and their logits."""
        with torch.inference_mode():
            best, tokens = self._network.model.compute_logits(hidden).max(dim=-1)
        return tokens, best
