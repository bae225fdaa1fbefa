"""`HeadProposer`: a head guesses from what the model has computed (EAGLE, EAGLE-3, MTP), one token after another.

Of position p it is given the model's hidden states there and the token at p + 1, and it guesses the one after that. So
what a block keeps for a head depends, at the block's last position, on the first token behind the block: in a block
that several requests share it is that of the request which computed it. A guess may be another for it; no text is.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.messages.step import Int32Array, NewRequest
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.draft_head import DraftHead
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.spec_decode.chain import NO_ROW, followed, rooms, sound_drafts, step_batch
from pagemill.worker.spec_decode.hidden_states import WantedHidden
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext

Rows = npt.NDArray[np.int64]


class HeadProposer(Proposer):
    """S slots. Of each position, what the head keeps is computed in the step that computes it in the model."""

    computes = True

    def __init__(self, context: ProposerContext) -> None:
        """Raises ValueError where no head was loaded."""
        network, hidden = context.network, context.hidden
        if network is None or hidden is None or not isinstance(network.model, DraftHead):
            raise ValueError("a head proposes, and none was loaded")
        self._network = network
        self._head: DraftHead = network.model
        self._steps = network.follow_steps()
        self._given = hidden
        self._states = context.states
        self._max_drafts = context.max_drafts
        self._row = np.full(len(context.states.num_tokens), NO_ROW, np.int32)
        """[S] the row of `_hidden` from which a slot's next token is guessed; NO_ROW where there is none."""
        self._hidden: Tensor | None = None
        """[L, E]."""

    @classmethod
    def wants(cls, draft: CausalLM | None) -> WantedHidden | None:
        layers = draft.reads_layers if isinstance(draft, DraftHead) else ()
        return WantedHidden(layers=layers) if layers else WantedHidden(final=True)

    def begin(self, new: NewRequest) -> None:
        self._row[new.slot] = NO_ROW

    def replace(self, slot: int, position: int) -> None:
        self._row[slot] = NO_ROW

    def follow(self, slots: Int32Array) -> None:
        """Compute what the step has computed of the slots, but what it has of drafts that were wrong."""
        given = self._given.batch
        if given is None:
            return
        states = self._states
        self._row[slots] = NO_ROW
        step = followed(given, slots, states, self._network)
        if step is None:
            return
        rows = step.rows
        following = states.token_ids[given.token_slots[rows], given.positions[rows] + 1].astype(np.int64)
        batch = step_batch(step.slots, following, step.starts, step.ends, step.last)
        self._row[batch.sampled_slots] = np.arange(len(batch.sampled_slots))
        if self._steps is not None and self._steps.fits(batch):
            self._hidden = self._steps.follow(batch, np.flatnonzero(rows))
            return
        hidden = self._given.layers if self._given.wanted.layers else self._given.final
        hidden = hidden[: given.num_tokens]
        if not rows.all():
            hidden = hidden[on_device(np.flatnonzero(rows), hidden.device)]
        with torch.inference_mode():
            fused = self._head.fused(hidden)
        found = self._run(batch, on_device(batch.token_ids, fused.device), fused)
        self._hidden = found if self._steps is None else self._steps.place(found)

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        counts = np.zeros(len(slots), np.int32)
        rows = self._row[slots]
        which = np.flatnonzero(rows != NO_ROW)
        if self._hidden is None or not len(which):
            return [slots[:0]] * len(slots)
        room = rooms(self._network, slots) - (self._states.num_tokens[slots] - 1)
        # The first guess needs no place of its own, each further one that of the one before it.
        counts[which] = np.clip(room[which] + 1, 1, self._max_drafts)
        steps = self._steps
        whole = steps is not None and steps.takes(len(which)) and counts[which].min() == self._max_drafts
        if steps is not None and whole and self._hidden is steps.hidden:
            starts = self._states.num_tokens[slots[which]] - 1
            return sound_drafts(which, steps.guess(slots[which], rows[which], starts), len(slots))
        return self._guesses(slots, rows, which, counts)

    def _guesses(self, slots: Int32Array, rows: Int32Array, which: Rows, counts: Int32Array) -> list[Int32Array]:
        """Drafts of [L] slots, of which these have a row; `counts`: as many as there is room for."""
        if self._hidden is None:
            raise RuntimeError("no step has been followed")
        found: list[tuple[Rows, Tensor, Tensor]] = []
        tokens = torch.empty(0)
        hidden = self._hidden[on_device(rows[which].astype(np.int64), self._hidden.device)]
        with torch.inference_mode():
            for place in range(int(counts.max())):
                if place:
                    goes_on = counts[which] > place
                    if not goes_on.all():
                        kept = on_device(np.flatnonzero(goes_on), hidden.device)
                        hidden, tokens, which = hidden[kept], tokens[kept], which[goes_on]
                    starts = self._states.num_tokens[slots[which]] + (place - 2)
                    none = np.zeros(len(which), np.int64)
                    batch = step_batch(slots[which], none, starts, starts + 1, np.ones(len(which), np.bool_))
                    hidden = self._run(batch, tokens, hidden)
                tokens, logits = self._head.best(hidden)
                found.append((which, tokens, logits))
        return cut_drafts(found, counts)

    def _run(self, batch: InputBatch, tokens: Tensor, hidden: Tensor) -> Tensor:
        """[T] tokens, [T, E] -> [L, E] of the batch's sampled rows."""
        network = self._network
        positions, rows = (on_device(array, network.device) for array in (batch.positions, batch.logits_index))
        with torch.inference_mode(), forward_context(ForwardContext(network.groups.plan(batch))):
            if 0 < len(rows) < batch.num_tokens:
                return self._head.step(tokens, hidden, positions, rows)
            given = self._head.step(tokens, hidden, positions)
            return given if len(rows) else given[:0]


def cut_drafts(found: Sequence[tuple[Rows, Tensor, Tensor]], counts: Int32Array) -> list[Int32Array]:
    """Of each place, which slots have a guess there, [L] guesses and their logits -> drafts of each slot, of `counts`
    at most. What is not a number ends them: nothing is made of it."""
    drafts = np.zeros((len(counts), len(found)), np.int32)
    counts = counts.copy()
    for place, (which, tokens, logits) in enumerate(found):
        drafts[which, place] = tokens.cpu().numpy()
        broken = which[torch.isnan(logits).cpu().numpy()]
        counts[broken] = np.minimum(counts[broken], place)
    return [row[:count] for row, count in zip(drafts, counts.tolist(), strict=True)]
