"""`MasksOfStep`: the engine's half of the step extension "grammar_masks". Knows no grammar's library."""

import numpy as np

from pagemill.engine.extensions.interface import EngineContext, EngineExtension, IntArray
from pagemill.engine.structured_output.following import FollowedGrammar
from pagemill.grammar.mask_filler import MaskFiller
from pagemill.messages.grammar_masks import FormsBegun, GrammarMasks
from pagemill.messages.step import SchedulerOutput


class MasksOfStep(EngineExtension):
    """A mask for each slot that samples and whose grammar holds already, made when the tokens before are known."""

    def __init__(self, context: EngineContext) -> None:
        self._occupant = context.occupant
        self._followed: dict[int, FollowedGrammar] = {}
        self._is_followed = np.zeros(context.num_slots, bool)
        # The threads that compute steps here go on looking for work for some milliseconds after each: others would wait
        # for their cores, longer than one thread needs for all masks.
        self._filler = MaskFiller(parallel=context.computes_elsewhere)

    def payload(self, step: SchedulerOutput, sampled: IntArray) -> FormsBegun | None:
        for slot in step.released:
            if self._followed.pop(slot, None) is not None:
                self._is_followed[slot] = False
        began = []
        for new in step.new:
            grammar = self._occupant(new.slot).grammar
            if isinstance(grammar, FollowedGrammar):
                self._followed[new.slot] = grammar
                began.append(new.slot)
        self._is_followed[began] = True
        return FormsBegun(began) if began else None

    def awaited(self, sampled: IntArray) -> IntArray | None:
        if not self._followed:
            return None
        followed: IntArray = sampled[self._is_followed[sampled]]
        return followed if len(followed) else None

    def sampling_payload(self, slots: IntArray) -> GrammarMasks:
        followed = self._followed
        held = [slot for slot in slots.tolist() if followed[slot].holds]
        grammars = [followed[slot] for slot in held]
        num_words = max((grammar.num_words for grammar in grammars), default=0)
        ahead = [slot for slot, grammar in zip(held, grammars, strict=True) for _ in range(grammar.num_ahead)]
        masks = np.empty((len(held) + len(ahead), num_words), np.int32)
        FollowedGrammar.fill(grammars, masks[: len(held)], self._filler)
        if ahead:
            FollowedGrammar.fill_ahead(grammars, masks[len(held) :], self._filler)
        return GrammarMasks(held + ahead, masks)
