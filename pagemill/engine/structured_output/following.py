"""`FollowedGrammar`: the grammar of one request, as the scheduler and the masks of steps need it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagemill.engine.structured_output.watching import OutputWatch
from pagemill.grammar.interface import GrammarTooComplexError, TokenMatcher
from pagemill.grammar.mask_filler import MaskFiller
from pagemill.messages.engine_io import Finish, FinishReason
from pagemill.messages.structured_outputs import FreeTokens


class FollowedGrammar:
    """Implements `engine.grammar.Grammar`. Before the form there may be tokens that are free."""

    def __init__(
        self,
        matcher: TokenMatcher | None,
        num_words: int,
        ends: Sequence[int],
        free: FreeTokens | None = None,
        watch: OutputWatch | None = None,
        *,
        waits: bool = False,
    ) -> None:
        """`matcher`: None: nothing but the end of reasoning is ever restricted. `num_words`: of a mask; `ends`: tokens
        that end an output. `waits`: for a trigger, which the watch tells."""
        self._matcher = matcher
        self._watch = watch
        self._waits = waits
        self._ends = ends
        self._steps = () if free is None else free.ends
        self._begin = None if free is None else free.begin
        """The token that may come first, and begin what is free."""
        self._recent: list[int] = []
        self._problem: str | None = None
        self.num_words = num_words
        self._follows = matcher is not None and not waits and (self._begin is not None or not self._steps)
        """Whether the grammar has begun, or may."""
        self._is_plain = self._follows and watch is None and self._begin is None
        """Whether the grammar has said from the first token on, alone, what may come next."""
        self._held: list[int] = []
        """What is left of forced tokens that are sampled."""
        self._ahead: list[TokenMatcher] = []
        """The grammar after each draft that the next step may verify."""

    @property
    def holds(self) -> bool:
        """Whether there is a mask for what comes next."""
        return self._is_plain or self._follows or bool(self._end_of_thinking())

    def accept(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these."""
        self._ahead = []
        self._held = self._held[len(token_ids) :]
        if not self._is_plain:
            token_ids = self._not_free(token_ids)
        if not token_ids or self._matcher is None or self._problem is not None:
            return
        try:
            count = self._matcher.accept(token_ids)
        except GrammarTooComplexError as error:
            self._problem = str(error)
            return
        if count < len(token_ids) and token_ids[count] not in self._ends:
            self._problem = f"token {token_ids[count]} is not what the form allows"

    def _not_free(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Those of the tokens, with which the output goes on, that the grammar is to see."""
        left = list(token_ids) if self._watch is None else self._watched(self._watch, token_ids)
        if left and self._begin is not None:
            self._follows = left[0] != self._begin
            self._begin = None
        while left and not self._follows and self._steps:
            self._pass(left.pop(0))
        return left if self._follows else ()

    def forced_tokens(self) -> Sequence[int]:
        """Those that must come next, as far as there is no choice."""
        if self._held:
            return ()
        if end := self._end_of_thinking():
            return end
        if not self._follows or self._matcher is None or self._begin is not None:
            return ()
        if self._problem is not None or self._matcher.ended:
            return ()
        found = self._matcher.forced()
        return found[: self._matcher.count_allowed(found)] if found else ()

    def hold(self, token_ids: Sequence[int]) -> bool:
        """Only as long as the grammar alone says what may come."""
        if not self._is_plain:
            return False
        self._held = list(token_ids)
        return True

    def is_complete_with(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing may follow these, which may come next."""
        if not self._follows or self._matcher is None:
            return False
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
        ended = self._follows and self._matcher is not None and self._matcher.ended
        return Finish(FinishReason.STOP) if ended else None

    def count_allowed(self, draft_ids: Sequence[int], *, forces: bool) -> int:
        """As long as the grammar alone says what may come, up to where it ends or, where that is appended, forces
        something: what is sampled there would be void."""
        self._ahead = []
        matcher = self._matcher
        if not self._is_plain or matcher is None or self._problem is not None or self._held:
            return 0
        for token in draft_ids:
            matcher = matcher.copy()
            try:
                fits = matcher.accept([token]) == 1
            except GrammarTooComplexError:
                fits = False
            if not fits or matcher.ended or (forces and matcher.forced()):
                break
            self._ahead.append(matcher)
        return len(self._ahead)

    @property
    def num_ahead(self) -> int:
        """Drafts that the next step may verify."""
        return len(self._ahead)

    @staticmethod
    def fill_ahead(grammars: "Sequence[FollowedGrammar]", masks: npt.NDArray[np.int32], filler: MaskFiller) -> None:
        """[sum of `num_ahead`, W] the masks of what may come after each draft, grammar after grammar. Where that cannot
        be told nothing may come, which is an error if the output gets there."""
        matchers = [matcher for grammar in grammars for matcher in grammar._ahead]
        if matchers:
            for row, problem in enumerate(filler.fill(matchers, masks)):
                if problem is not None:
                    masks[row] = 0

    @staticmethod
    def fill(grammars: "Sequence[FollowedGrammar]", masks: npt.NDArray[np.int32], filler: MaskFiller) -> None:
        """[K, W] the masks of what may come next of [K] outputs that are restricted, in one call. Where that cannot be
        told, one that ends the output, which is an error."""
        rows = [row for row, grammar in enumerate(grammars) if grammar._is_followed()]
        found = masks if len(rows) == len(grammars) else np.empty((len(rows), masks.shape[1]), np.int32)
        matchers = [matcher for row in rows if (matcher := grammars[row]._matcher) is not None]
        for row, problem in zip(rows, filler.fill(matchers, found), strict=True):
            grammars[row]._problem = problem
        if found is not masks:
            masks[rows] = found
        for row, grammar in enumerate(grammars):
            if grammar._is_plain and grammar._problem is None and not grammar._held:
                continue
            mask = masks[row]
            if grammar._problem is not None:
                mask[:] = 0
                _allow(mask, grammar._ends[0])
            elif grammar._held:
                mask[:] = 0
                _allow(mask, grammar._held[0])
            elif end := grammar._end_of_thinking():
                mask[:] = 0
                _allow(mask, end[0])
            elif grammar._begin is not None:
                _allow(mask, grammar._begin)

    def _is_followed(self) -> bool:
        """Whether the grammar says what may come next."""
        if self._problem is not None or self._matcher is None or self._held:
            return False
        return self._is_plain or not self._end_of_thinking()

    def _end_of_thinking(self) -> Sequence[int]:
        """What is left of the end of a reasoning that has had its budget."""
        return self._watch.forced if self._watch is not None else ()

    def _watched(self, watch: OutputWatch, token_ids: Sequence[int]) -> list[int]:
        """The tokens that the grammar is still to see. Where it cannot go on from a trigger, because the token that
        completes it goes on otherwise, the output stays free."""
        left = [] if self._waits else list(token_ids)
        for number, token in enumerate(token_ids):
            begun = watch.take(token)
            if not begun or not self._waits or self._matcher is None:
                continue
            attempt = self._matcher.copy()
            try:
                fits = attempt.accept(begun) == len(begun)
            except GrammarTooComplexError:
                fits = False
            if fits:
                self._matcher = attempt
                self._waits = False
                self._follows = True
                left = list(token_ids[number + 1 :])
        return left

    def _pass(self, token: int) -> None:
        """A token that is free."""
        ends = self._steps[0]
        self._recent = [*self._recent, token][-max(map(len, ends)) :]
        if any(self._recent[-len(end) :] == list(end) for end in ends):
            self._steps = self._steps[1:]
            self._recent = []
            self._follows = not self._steps


def _allow(mask: npt.NDArray[np.int32], token: int) -> None:
    mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
