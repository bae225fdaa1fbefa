"""`RowHeadsProposer`: heads guess from the hidden state that a slot's last token was sampled from (Medusa, MLP
speculators). They keep nothing of a slot, in the cache or elsewhere."""

from collections.abc import Sequence

import numpy as np
import torch

from pagemill.messages.step import Int32Array
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.row_heads import RowHeads
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.spec_decode.chain import sound_drafts
from pagemill.worker.spec_decode.hidden_states import WantedHidden
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext

_NONE = -1


class RowHeadsProposer(Proposer):
    """All heads run for all slots at once."""

    computes = True

    def __init__(self, context: ProposerContext) -> None:
        """Raises ValueError where no heads were loaded."""
        network, hidden = context.network, context.hidden
        if network is None or hidden is None or not isinstance(network.model, RowHeads):
            raise ValueError("heads propose, and none were loaded")
        self._heads: RowHeads = network.model
        self._device = network.device
        self._steps = network.steps
        self._given = hidden
        self._states = context.states
        self._count = min(context.max_drafts, self._heads.num_heads)
        self._row = np.full(len(context.states.num_tokens), _NONE, np.int32)
        """[S] the row of the step's hidden states from which a slot's last token was sampled."""

    @classmethod
    def wants(cls, draft: CausalLM | None) -> WantedHidden | None:
        return WantedHidden(sampled=True)

    def follow(self, slots: Int32Array) -> None:
        """Find the row of each slot: the last one whose draft was right, where the step verified drafts."""
        given = self._given.batch
        if given is None:
            return
        self._row[slots] = _NONE
        sampled = given.sampled_slots
        rows = np.flatnonzero(given.sampled_positions == self._states.num_tokens[sampled] - 1)
        self._row[sampled[rows]] = rows

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        rows = self._row[slots]
        which = np.flatnonzero(rows != _NONE)
        steps = self._steps
        if steps is not None and len(which) and steps.takes(len(which)):
            asked = slots[which]
            last = self._states.token_ids[asked, self._states.num_tokens[asked] - 1]
            return sound_drafts(which, steps.guess(asked, rows[which], tokens=last), len(slots))
        drafts = np.zeros((len(slots), self._count), np.int32)
        counts = np.zeros(len(slots), np.int64)
        if len(which):
            states = self._states
            asked = slots[which]
            last = states.token_ids[asked, states.num_tokens[asked] - 1].astype(np.int64)
            with torch.inference_mode():
                hidden = self._given.sampled[on_device(rows[which].astype(np.int64), self._device)]
                tokens, logits = self._heads.guess(hidden, on_device(last, self._device), self._count)
                broken = torch.isnan(logits).cpu().numpy()
            drafts[which] = tokens.cpu().numpy()
            # Up to the first that is no number: nothing is made of it.
            counts[which] = np.where(broken.any(1), broken.argmax(1), self._count)
        return [row[:count] for row, count in zip(drafts, counts.tolist(), strict=True)]
