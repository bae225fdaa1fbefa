"""`DraftModelProposer`: a smaller model of the same vocabulary guesses the most likely tokens, one after another.

What it keeps of a token lies in the same blocks as what the model keeps of it. It computes every token that the model
has computed by the end of the same step, so that its part of a block is good wherever the model's is: in blocks that
are shared, and after a request was preempted. Tokens that it guessed and that turn out to be right it need not compute
again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.messages.step import Int32Array, NewRequest
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.spec_decode.chain import NO_ROW, rooms, step_batch
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext


class DraftModelProposer(Proposer):
    """S slots. All that is learnt of a slot is how many of its tokens the draft model has computed."""

    computes = True

    def __init__(self, context: ProposerContext) -> None:
        """Raises ValueError where no model was loaded."""
        if context.network is None:
            raise ValueError("a draft model proposes, and none was loaded")
        self._network = context.network
        self._states = context.states
        self._max_drafts = context.max_drafts
        num_slots = len(context.states.num_tokens)
        self._computed = np.zeros(num_slots, np.int32)
        """[S] first tokens of a slot that are computed, those included that were guessed and may be others now."""
        self._row = np.full(num_slots, NO_ROW, np.int32)
        """[S] the row of `_hidden` after a slot's last token; -1 where that is not computed."""
        self._hidden: Tensor | None = None
        """[L, E]."""

    def begin(self, new: NewRequest) -> None:
        self._computed[new.slot] = new.num_computed_tokens
        self._row[new.slot] = NO_ROW

    def replace(self, slot: int, position: int) -> None:
        self._computed[slot] = min(self._computed[slot], position)
        self._row[slot] = NO_ROW

    def follow(self, slots: Int32Array) -> None:
        """Compute what the model has computed of the slots, and the last token of those that have sampled."""
        states = self._states
        self._row[slots] = NO_ROW
        known = states.num_tokens[slots]
        computed = states.num_computed[slots]
        ends = np.minimum(np.where(known - computed == 1, known, computed), rooms(self._network, slots))
        # What comes after the tokens that the model has computed was guessed, and may be something else now.
        starts = np.minimum(self._computed[slots], computed)
        self._computed[slots] = np.maximum(starts, ends)
        runs = ends > starts
        if not runs.any():
            return
        slots, starts, ends, known = slots[runs], starts[runs], ends[runs], known[runs]
        token_ids = np.concatenate(
            [states.token_ids[slot, start:end] for slot, start, end in zip(slots, starts, ends, strict=True)]
        )
        last = ends == known
        self._hidden = self._run(step_batch(slots, token_ids.astype(np.int64), starts, ends, last))
        self._row[slots[last]] = np.arange(int(last.sum()))

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        drafts = np.zeros((len(slots), self._max_drafts), np.int32)
        counts = np.zeros(len(slots), np.int32)
        rows = self._row[slots]
        which = np.flatnonzero(rows != NO_ROW)
        if self._hidden is not None and len(which):
            room = rooms(self._network, slots)
            known = self._states.num_tokens[slots]
            hidden = self._hidden[torch.from_numpy(rows[which].astype(np.int64))]
            for place in range(self._max_drafts):
                tokens, sound = self._most_likely(hidden)
                drafts[which, place] = tokens
                counts[which[sound]] += 1
                # The next one needs this one's keys and values, and a block that holds them.
                goes_on = sound & (known[which] + place < room[which])
                which = which[goes_on]
                if place + 1 == self._max_drafts or not len(which):
                    break
                hidden = self._append(slots[which], tokens[goes_on], (known[which] + place).astype(np.int64))
        return [row[:count] for row, count in zip(drafts, counts.tolist(), strict=True)]

    def _append(self, slots: Int32Array, tokens: Int32Array, positions: npt.NDArray[np.int64]) -> Tensor:
        """[L] slots, guesses and their positions -> [L, E] hidden states after them."""
        starts = positions.astype(np.int32)
        ends = starts + 1
        every = np.ones(len(slots), np.bool_)
        hidden = self._run(step_batch(slots, tokens.astype(np.int64), starts, ends, every))
        self._computed[slots] = ends
        return hidden

    def _run(self, batch: InputBatch) -> Tensor:
        """[L, E] hidden states of the batch's sampled rows."""
        network = self._network
        tokens, positions = (on_device(array, network.device) for array in (batch.token_ids, batch.positions))
        rows = on_device(batch.logits_index, network.device)
        with torch.inference_mode(), forward_context(ForwardContext(network.groups.plan(batch))):
            if 0 < len(rows) < batch.num_tokens:
                chosen: Tensor = network.model(tokens, positions, rows)
                return chosen
            hidden: Tensor = network.model(tokens, positions)
            return hidden[rows]

    def _most_likely(self, hidden: Tensor) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        """[L, E] -> [L] tokens, and which of them are more than what a broken computation gives."""
        with torch.inference_mode():
            logits = self._network.model.compute_logits(hidden)
            best, tokens = logits.max(dim=-1)
        return tokens.cpu().numpy().astype(np.int32), ~torch.isnan(best).cpu().numpy()
