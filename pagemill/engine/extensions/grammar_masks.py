"""`MasksOfStep`: the engine's half of the step extension "grammar_masks". Knows no grammar's library."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pagemill.engine.extensions.interface import EngineContext, EngineExtension, IntArray
from pagemill.engine.structured_output.following import FollowedGrammar
from pagemill.grammar.mask_filler import MaskFiller
from pagemill.messages.grammar_masks import FormsBegun, GrammarMasks
from pagemill.messages.pending import OnThread, Pending, Ready
from pagemill.messages.step import SchedulerOutput

FEW = 4
"""Masks are made at once where there are fewer: that takes less than waking a thread."""


class MasksOfStep(EngineExtension):
    """A mask for each slot that samples and whose grammar holds already, made as soon as the tokens before are known:
    if that is before the step is computed, and they are several, on a thread of its own meanwhile."""

    def __init__(self, context: EngineContext) -> None:
        self._occupant = context.occupant
        self._followed: dict[int, FollowedGrammar] = {}
        self._filler = MaskFiller()
        self._thread: ThreadPoolExecutor | None = None

    def payload(self, step: SchedulerOutput, sampled: IntArray) -> FormsBegun | None:
        for slot in step.released:
            self._followed.pop(slot, None)
        began = []
        for new in step.new:
            grammar = self._occupant(new.slot).grammar
            if isinstance(grammar, FollowedGrammar):
                self._followed[new.slot] = grammar
                began.append(new.slot)
        return FormsBegun(began) if began else None

    def awaited(self, sampled: IntArray) -> IntArray | None:
        if not self._followed:
            return None
        followed: IntArray = sampled[np.isin(sampled, list(self._followed))]
        return followed if len(followed) else None

    def sampling_payload(self, slots: IntArray, meanwhile: bool) -> Pending[GrammarMasks]:
        held = {slot: grammar for slot in slots.tolist() if (grammar := self._followed[slot]).holds}
        if not meanwhile or len(held) < FEW:
            return Ready(self._filled(held))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pagemill-masks")
        return OnThread(self._thread.submit(self._filled, held))

    def joins_every_step(self, slots: IntArray) -> bool:
        return bool(self._followed)

    def _filled(self, held: dict[int, FollowedGrammar]) -> GrammarMasks:
        num_words = max((grammar.num_words for grammar in held.values()), default=0)
        masks = np.empty((len(held), num_words), np.int32)
        FollowedGrammar.fill(list(held.values()), masks, self._filler)
        return GrammarMasks(list(held), masks)
