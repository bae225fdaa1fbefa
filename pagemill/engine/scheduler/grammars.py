"""What grammars add to a step: tokens that they force, and drafts that they rule out.

Knows nothing about blocks, queues or the next step.
"""

from collections.abc import Sequence

import numpy as np

from pagemill.engine.grammar import Grammar
from pagemill.engine.request import Request
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.engine.scheduler.update import SlotTokens
from pagemill.messages.engine_io import Finish, FinishReason
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import KnownTokens


def begin_output(request: Request, limits: SchedulerLimits) -> Finish | None:
    """Append what a new request's grammar forces before anything is sampled. Why the request ends with that, if it
    does. Its first output reports the tokens. One that wants its prompt computed, and maybe nothing else, must run."""
    grammar = request.grammar
    if grammar is None or request.keeps_no_token or request.scores_prompt:
        return None
    position = request.num_tokens
    stretch = grammar.forced_tokens() if _may_force(request, limits) else ()
    forced, finish = _forced(request, grammar, position, stretch)
    finish = finish or grammar.end()
    if forced and request.scores_output:
        if finish is not None:  # the grammar cannot be followed: nobody computes what these need
            return finish
        request.forced.unscored_from = position
    request.forced.token_ids = forced
    request.token_ids.extend(forced)
    return finish


def follow_grammars(
    states: SlotStates, new: SlotTokens, finished: dict[int, Finish], drafts: SlotTokens | None, limits: SchedulerLimits
) -> tuple[SlotTokens, list[KnownTokens]]:
    """Tell the grammars of [L] slots the new tokens, which are appended already, and append what must follow them.

    Returns all that is new of the slots, and what the workers must hear of it. Adds to `finished` (position in [L] ->
    why) those whose request ends with a forced token. `drafts`: what the workers propose for the same slots; as many
    of them as may come next are counted.
    """
    lists = new.lists()
    draft_ids = None if drafts is None else drafts.lists()
    known: list[KnownTokens] = []
    for row, slot in enumerate(new.slots.tolist()):
        grammar = states.grammars.get(slot)
        if grammar is None:
            continue
        request = states.occupant(slot)
        tokens = lists[row]
        grammar.accept(tokens)
        # The step that sampled has computed what comes before these.
        lists[row] = request.forced.token_ids + tokens
        request.forced.token_ids = []
        request.forced.unscored_from = None
        if row not in finished and (end := grammar.end()) is not None:
            finished[row] = end
        if row in finished:
            continue
        stretch = grammar.forced_tokens() if _may_force(request, limits) else ()
        if stretch and _left_to_masks(states, slot, grammar, stretch, limits):
            states.num_drafts[slot] = 0
            continue
        forced, finish = _force(states, slot, grammar, stretch)
        if forced is not None:
            if not request.scores_output:
                lists[row] += forced.token_ids.tolist()
            if finish is None:
                known.append(forced)
            else:
                finished[row] = finish
        elif states.num_drafts[slot] and draft_ids is not None:
            # With a token in flight, it is another step that would verify them, and not these.
            in_flight = states.num_expected[slot] > states.num_known[slot]
            forces = _may_force(request, limits)
            states.num_drafts[slot] = 0 if in_flight else grammar.count_allowed(draft_ids[row], forces=forces)
    return _with_forced(new, lists), known


def _with_forced(new: SlotTokens, lists: list[list[int]]) -> SlotTokens:
    """All new tokens of each slot; `new` itself where none were forced, as in most steps."""
    if sum(map(len, lists)) == len(new.token_ids):
        return new
    counts = np.array([len(tokens) for tokens in lists], np.int64)
    return SlotTokens(new.slots, np.array([token for tokens in lists for token in tokens], np.int64), counts)


def _force(
    states: SlotStates, slot: int, grammar: Grammar, stretch: Sequence[int]
) -> tuple[KnownTokens | None, Finish | None]:
    """Append what a grammar forces, of which `stretch` is the beginning, to its slot, whose request knows it where it
    is to be reported later. Returns these tokens, if there are any, and why the request ends with the last of them, if
    it does."""
    request = states.occupant(slot)
    position = int(states.num_known[slot])
    forced, finish = _forced(request, grammar, position, stretch)
    if not forced:
        return None, finish
    # The token before them may be computed, or about to be, for a sample and no more.
    num_computed = position - request.scores_output
    states.force(slot, forced, num_computed)
    if request.scores_output:
        request.forced.token_ids = forced
        request.forced.unscored_from = position
    return KnownTokens(slot, position, num_computed, np.array(forced, np.int32)), finish or grammar.end()


def _forced(
    request: Request, grammar: Grammar, num_known: int, stretch: Sequence[int]
) -> tuple[list[int], Finish | None]:
    """All tokens that a grammar forces after the first `num_known` of its request, which it is told; and why the
    request ends with the last of them, if it does. `stretch`: what it has said of them, none if it forces none. One
    that wants log-probabilities does not: these come with a token that is sampled, so the last one is, from what the
    grammar's mask leaves."""
    found: list[int] = []
    finish = None
    while finish is None and stretch:
        kept, finish = up_to_end(request, num_known + len(found), stretch)
        if request.scores_output and (finish is not None or grammar.is_complete_with(kept)):
            grammar.accept(kept[:-1])
            return found + kept[:-1], None
        grammar.accept(kept)
        found += kept
        stretch = grammar.forced_tokens() if finish is None else ()
    return found, finish


def _left_to_masks(
    states: SlotStates, slot: int, grammar: Grammar, stretch: Sequence[int], limits: SchedulerLimits
) -> bool:
    """Whether the tokens that a grammar forces are left to the steps that run anyway, whose masks leave nothing else.

    That is so for a single one whose step is in flight already: to append it would make void what this step samples,
    and the next one would begin where it begins now, so no step is saved, and those that repeat would be interrupted.
    Counts decide, never times: how an output is computed must not depend on how busy a machine is.
    """
    if not limits.holds_forced or len(stretch) > 1 or states.num_expected[slot] <= states.num_known[slot]:
        return False
    params = states.occupant(slot).params
    # Before min_tokens, sampling rules out stop ids, also where nothing else may come.
    stop_ids = params.stop_token_ids or () if isinstance(params, SamplingParams) else ()
    return stretch[0] not in stop_ids and grammar.hold(stretch)


def _may_force(request: Request, limits: SchedulerLimits) -> bool:
    """Whether forced tokens are appended: not where a request rules out tokens, and so may say the same with others."""
    params = request.params
    if not limits.jump_forward or not isinstance(params, SamplingParams) or params.bad_words_token_ids:
        return False
    return limits.scores_forced or not request.scores_output


def up_to_end(request: Request, num_known: int, token_ids: Sequence[int]) -> tuple[list[int], Finish | None]:
    """Those of the tokens that a request still gets after its first `num_known`, and why it ends with the last of
    them; None if it goes on."""
    params = request.params
    stop_ids = params.stop_token_ids or () if isinstance(params, SamplingParams) else ()
    stop_from = request.num_prompt_tokens + (params.min_tokens if isinstance(params, SamplingParams) else 0)
    for count, token in enumerate(token_ids, 1):
        length = num_known + count
        if token in stop_ids and length > stop_from:
            return list(token_ids[:count]), Finish(FinishReason.STOP, token)
        if length >= request.length_limit:
            return list(token_ids[:count]), Finish(FinishReason.LENGTH)
    return list(token_ids), None
