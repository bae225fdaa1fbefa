"""`ParallelHeadProposer`: a head guesses all tokens of a slot in one pass (P-EAGLE)."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagemill.messages.step import Int32Array
from pagemill.model.models.parallel_eagle import ParallelEagle3Head
from pagemill.worker.batch.buffers import on_device
from pagemill.worker.spec_decode.chain import step_batch
from pagemill.worker.spec_decode.heads import HeadProposer, Rows, cut_drafts
from pagemill.worker.spec_decode.interface import ProposerContext


class ParallelHeadProposer(HeadProposer):
    """The first guess comes from the pass that computes what the step has computed, the others from one more pass, in
    which they see what is before them."""

    def __init__(self, context: ProposerContext) -> None:
        """Raises ValueError where no such head was loaded."""
        super().__init__(context)
        if not isinstance(self._head, ParallelEagle3Head):
            raise ValueError("a head proposes that guesses all tokens at once, and none was loaded")
        self._parallel = self._head
        self._masked: Tensor | None = None

    def _guesses(self, slots: Int32Array, rows: Int32Array, which: Rows, counts: Int32Array) -> list[Int32Array]:
        if self._hidden is None:
            raise RuntimeError("no step has been followed")
        head = self._parallel
        with torch.inference_mode():
            hidden = self._hidden[on_device(rows[which].astype(np.int64), self._hidden.device)]
            found = [(which, *head.best(hidden))]
            further = which[counts[which] > 1]
            more = counts[further] - 1
            if len(further):
                if self._masked is None:
                    self._masked = head.masked()
                starts = self._states.num_tokens[slots[further]] - 1
                masks = np.full(int(more.sum()), head.mask_token, np.int64)
                batch = step_batch(slots[further], masks, starts, starts + more, np.ones(len(further), np.bool_))
                batch = replace(batch, logits_index=np.arange(len(masks)))  # of all rows
                tokens = on_device(masks, hidden.device)
                guesses, logits = head.best(self._run(batch, tokens, self._masked.expand(len(masks), -1)))
                firsts = np.cumsum(more) - more
                for place in range(int(more.max())):
                    goes_on = more > place
                    taken = on_device((firsts[goes_on] + place).astype(np.int64), hidden.device)
                    found.append((further[goes_on], guesses[taken], logits[taken]))
        return cut_drafts(found, counts)
