"""`FollowedGrammar`: the grammar of one request, as the scheduler and the masks of steps need it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagemill.grammar.interface import GrammarTooComplexError, TokenMatcher
from pagemill.grammar.mask_filler import MaskFiller
from pagemill.messages.engine_io import Finish, FinishReason
from pagemill.messages.structured_outputs import FreeTokens


class FollowedGrammar:
    """Implements `engine.grammar.Grammar`. Before the form there may be tokens that are free."""

    def __init__(
        self, matcher: TokenMatcher, num_words: int, ends: Sequence[int], free: FreeTokens | None = None
    ) -> None:
        """`num_words`: of a mask; `ends`: tokens that end an output."""
        self._matcher = matcher
        self._ends = ends
        self._steps = () if free is None else free.ends
        self._begin = None if free is None else free.begin
        """The token that may come first, and begin what is free."""
        self._recent: list[int] = []
        self._problem: str | None = None
        self.num_words = num_words
        self.holds = self._begin is not None or not self._steps
        """Whether there is a mask for what comes next."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these."""
        left = list(token_ids)
        if left and self._begin is not None:
            self.holds = left[0] != self._begin
            self._begin = None
        while left and not self.holds:
            self._pass(left.pop(0))
        if not left or self._problem is not None:
            return
        try:
            count = self._matcher.accept(left)
        except GrammarTooComplexError as error:
            self._problem = str(error)
            return
        if count < len(left) and left[count] not in self._ends:
            self._problem = f"token {left[count]} is not what the form allows"

    def forced_tokens(self) -> Sequence[int]:
        """Those that must come next, as far as there is no choice."""
        if not self.holds or self._begin is not None or self._problem is not None or self._matcher.ended:
            return ()
        found = self._matcher.forced()
        return found[: self._matcher.count_allowed(found)]

    def is_complete_with(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing may follow these, which may come next."""
        ahead = self._matcher.copy()
        try:
            return ahead.accept(token_ids) < len(token_ids) or ahead.ended
        except GrammarTooComplexError:
            return True

    def end(self) -> Finish | None:
        """Complete, or not to be followed any further."""
        if self._problem is not None:
            message = f"the output cannot be held to its form any further: {self._problem}"
            return Finish(FinishReason.ERROR, message=message)
        return Finish(FinishReason.STOP) if self.holds and self._matcher.ended else None

    def count_allowed(self, draft_ids: Sequence[int]) -> int:
        """None of them: a mask is made for one token."""
        return 0

    @staticmethod
    def fill(grammars: "Sequence[FollowedGrammar]", masks: npt.NDArray[np.int32], filler: MaskFiller) -> None:
        """[K, W] the masks of what may come next of [K] outputs that are restricted, in one call. Where that cannot be
        told, one that ends the output, which is an error."""
        rows = [row for row, grammar in enumerate(grammars) if grammar._problem is None]
        found = masks if len(rows) == len(grammars) else np.empty((len(rows), masks.shape[1]), np.int32)
        for row, problem in zip(rows, filler.fill([grammars[row]._matcher for row in rows], found), strict=True):
            grammars[row]._problem = problem
        if found is not masks:
            masks[rows] = found
        for mask, grammar in zip(masks, grammars, strict=True):
            if grammar._problem is not None:
                mask[:] = 0
                _allow(mask, grammar._ends[0])
            elif grammar._begin is not None:
                _allow(mask, grammar._begin)

    def _pass(self, token: int) -> None:
        """A token that is free."""
        ends = self._steps[0]
        self._recent = [*self._recent, token][-max(map(len, ends)) :]
        if any(self._recent[-len(end) :] == list(end) for end in ends):
            self._steps = self._steps[1:]
            self._recent = []
            self.holds = not self._steps


def _allow(mask: npt.NDArray[np.int32], token: int) -> None:
    mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
