"""`BlockHeadProposer`: a head guesses all tokens of a block in one pass, in which they see each other (DFlash).

What it keeps of a position depends on what the model has computed there and on nothing else: a block that is shared
holds the same for all. Keys and values of guesses lie behind them, in blocks of their slot, until the step that
verifies the guesses has computed the positions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pagemill.messages.step import Int32Array, NewRequest
from pagemill.model.forward_context import ForwardContext, forward_context
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.dflash import DFlashHead
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.spec_decode.chain import followed, rooms, sound_drafts, step_batch
from pagemill.worker.spec_decode.heads import cut_drafts
from pagemill.worker.spec_decode.hidden_states import WantedHidden
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext


class BlockHeadProposer(Proposer):
    """S slots. A block is the last token of a slot and as many tokens that stand for unknown ones as it may have
    drafts."""

    computes = True

    def __init__(self, context: ProposerContext) -> None:
        """Raises ValueError where no such head was loaded."""
        network, hidden = context.network, context.hidden
        if network is None or hidden is None or not isinstance(network.model, DFlashHead):
            raise ValueError("a head proposes that guesses blocks, and none was loaded")
        self._network = network
        self._head = network.model
        self._steps = network.follow_steps()
        self._given = hidden
        self._states = context.states
        self._max_drafts = context.max_drafts
        self._ready = np.zeros(len(context.states.num_tokens), np.bool_)
        """[S] whether what the head keeps of a slot is there up to its last token."""
        causal = self._head.causal_layers()
        self._ahead = [name for name, is_causal in causal.items() if not is_causal]
        """Layers in which tokens of a block see those behind them."""
        self._all_ahead = len(self._ahead) == len(causal)

    @classmethod
    def wants(cls, draft: CausalLM | None) -> WantedHidden | None:
        return WantedHidden(layers=draft.reads_layers) if isinstance(draft, DFlashHead) else None

    def begin(self, new: NewRequest) -> None:
        self._ready[new.slot] = False

    def replace(self, slot: int, position: int) -> None:
        self._ready[slot] = False

    def follow(self, slots: Int32Array) -> None:
        """Keep what the step has computed of the slots, but what it has of drafts that were wrong."""
        given = self._given.batch
        if given is None:
            return
        self._ready[slots] = False
        step = followed(given, slots, self._states, self._network)
        if step is None:
            return
        no_tokens = np.zeros(int(step.rows.sum()), np.int64)
        batch = step_batch(step.slots, no_tokens, step.starts, step.ends, step.last)
        self._ready[step.slots] = step.last
        if self._steps is not None and self._steps.fits(batch):
            self._steps.follow(batch, np.flatnonzero(step.rows))
            return
        hidden = self._given.layers[: given.num_tokens]
        if not step.rows.all():
            hidden = hidden[on_device(np.flatnonzero(step.rows), hidden.device)]
        network = self._network
        with torch.inference_mode(), forward_context(ForwardContext(network.groups.plan(batch))):
            self._head.keep(hidden, on_device(batch.positions, network.device))

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        known = self._states.num_tokens[slots]
        # A block begins with the last token, and all of it has a place of its own.
        counts = np.clip(rooms(self._network, slots) - known, 0, self._max_drafts) * self._ready[slots]
        counts = counts.astype(np.int32)
        which = np.flatnonzero(counts)
        if not len(which):
            return [slots[:0]] * len(slots)
        steps = self._steps
        if steps is not None and steps.takes(len(which)) and counts[which].min() == self._max_drafts:
            asked, starts = slots[which], known[which] - 1
            last = self._states.token_ids[asked, starts]
            return sound_drafts(which, steps.guess(asked, starts=starts, tokens=last), len(slots))
        batch = self._blocks(slots[which], known[which], counts[which])
        network = self._network
        tokens, positions, rows = (
            on_device(array, network.device) for array in (batch.token_ids, batch.positions, batch.logits_index)
        )
        with torch.inference_mode():
            with forward_context(ForwardContext(self._plan(batch))):
                hidden = self._head.guess(tokens, positions, rows)
            guesses, logits = self._head.best(hidden)
        firsts = np.cumsum(counts[which]) - counts[which]
        found = []
        for place in range(int(counts.max())):
            goes_on = counts[which] > place
            taken = on_device((firsts[goes_on] + place).astype(np.int64), hidden.device)
            found.append((which[goes_on], guesses[taken], logits[taken]))
        return cut_drafts(found, counts)

    def _blocks(self, slots: Int32Array, known: Int32Array, counts: Int32Array) -> InputBatch:
        """A step of [R] slots whose last token is followed by so many unknown ones, of which guesses are asked for."""
        starts = known - 1
        ends = known + counts
        lengths = ends - starts
        firsts = np.cumsum(lengths) - lengths
        tokens = np.full(int(lengths.sum()), self._head.mask_token, np.int64)
        tokens[firsts] = self._states.token_ids[slots, starts]
        unknown = np.ones(len(tokens), np.bool_)
        unknown[firsts] = False
        batch = step_batch(slots, tokens, starts, ends, np.ones(len(slots), np.bool_))
        return replace(batch, logits_index=np.flatnonzero(unknown))

    def _plan(self, batch: InputBatch) -> dict[str, Any]:
        """Metadata of a step of blocks for every layer."""
        plan = self._network.groups.plan
        if not self._ahead:
            return plan(batch)
        # Attention lets a token see what is before it. So that all of a block see all of it, each is a request of its
        # own, as long as the whole; what all of them keep is written before any of them attends.
        apart = replace(
            batch,
            slots=batch.token_slots,
            query_start=np.arange(batch.num_tokens + 1, dtype=np.int32),
            seq_lens=np.repeat(batch.seq_lens, np.diff(batch.query_start)),
        )
        planned = plan(apart)
        if self._all_ahead:
            return planned
        return plan(batch) | {name: planned[name] for name in self._ahead}
