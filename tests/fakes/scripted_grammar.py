"""`ScriptedGrammar`: a grammar that forces tokens by a rule, and no automaton."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from pagemill.engine.scheduler.scheduler import GrammarOf

Rule = Callable[[Sequence[int]], Sequence[int]]
"""The output so far -> the tokens that must follow."""


def after_threes(output: Sequence[int]) -> Sequence[int]:
    """The tokens that must follow this output: a token below 100 that three divides is followed by a third of it and
    one more tokens, which count up from it and 100."""
    for back, token in enumerate(reversed(output)):
        if token < 100:
            return [100 + token + place for place in range(token // 3 + 1)][back:] if token % 3 == 0 else []
    return []


def after_start(output: Sequence[int]) -> Sequence[int]:
    """As `after_threes`, and an output begins with two tokens that nobody chooses."""
    return [7, 103][len(output) :] if len(output) < 2 else after_threes(output)


def at_positions(table: Mapping[int, Sequence[int]]) -> Rule:
    """The rule that forces tokens at places of the output: the first place -> tokens."""

    def rule(output: Sequence[int]) -> Sequence[int]:
        for place, tokens in table.items():
            if place <= len(output) < place + len(tokens):
                return tokens[len(output) - place :]
        return []

    return rule


SOME_PLACES = {0: [35, 49], 5: [111, 12, 213], 10: [20], 12: [30], 17: [41, 42, 43, 44, 45, 46, 47]}
"""Of `at_positions`: at the beginning, one by one, and more than a block."""


class ScriptedGrammar:
    """`rule`: the output so far -> the tokens that must follow; `output`: what a resumed request has already."""

    def __init__(self, rule: Rule, output: Iterable[int] = ()) -> None:
        self._rule = rule
        self.output = list(output)
        self.seen_drafts: list[list[int]] = []

    def end(self) -> None:
        return None

    def is_complete_with(self, token_ids: Sequence[int]) -> bool:
        return False

    def hold(self, token_ids: Sequence[int]) -> bool:
        """There are no masks."""
        return False

    def accept(self, token_ids: Sequence[int]) -> None:
        self.output += token_ids

    def forced_tokens(self) -> Sequence[int]:
        return self._rule(self.output)

    def count_allowed(self, draft_ids: Sequence[int], *, forces: bool) -> int:
        """Up to the first after which something is forced: there is no mask that would make the model follow."""
        self.seen_drafts.append(list(draft_ids))
        for count in range(1, len(draft_ids) + 1):
            if forces and self._rule(self.output + list(draft_ids[:count])):
                return count - 1
        return len(draft_ids)


def grammar_of(rule: Rule) -> GrammarOf:
    """What a scheduler is given, so that the rule holds for every request."""
    return lambda core_request: ScriptedGrammar(rule, core_request.emitted_token_ids)
