"""What grammars add to a step: tokens that they force, and drafts that they rule out.

Knows nothing about blocks, queues or the next step.
"""

from collections.abc import Sequence

import numpy as np

from pagemill.engine.grammar import Grammar
from pagemill.engine.request import Request
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.engine.scheduler.update import SlotTokens
from pagemill.messages.engine_io import Finish, FinishReason
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import KnownTokens


def begin_output(request: Request) -> Finish | None:
    """Append what a new request's grammar forces before anything is sampled. Why the request ends with that, if it
    does. Its first output reports the tokens."""
    if request.grammar is None:
        return None
    request.forced, finish = _forced(request, request.grammar, request.num_tokens)
    request.token_ids.extend(request.forced)
    return finish


def follow_grammars(
    states: SlotStates, new: SlotTokens, finished: dict[int, Finish], drafts: SlotTokens | None
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
        lists[row] = request.forced + tokens
        request.forced = []
        if row in finished:
            continue
        position = int(states.num_known[slot])
        forced, finish = _forced(request, grammar, position)
        if forced:
            states.force(slot, forced)
            lists[row] += forced
            if finish is None:
                known.append(KnownTokens(slot, position, np.array(forced, np.int32)))
            else:
                finished[row] = finish
        elif states.num_drafts[slot] and draft_ids is not None:
            # With a token in flight, it is another step that would verify them, and not these.
            in_flight = states.num_expected[slot] > states.num_known[slot]
            states.num_drafts[slot] = 0 if in_flight else grammar.count_allowed(draft_ids[row])
    counts = np.array([len(tokens) for tokens in lists], np.int64)
    flat = np.array([token for tokens in lists for token in tokens], np.int64)
    return SlotTokens(new.slots, flat, counts), known


def _forced(request: Request, grammar: Grammar, num_known: int) -> tuple[list[int], Finish | None]:
    """All tokens that a grammar forces after the first `num_known` of its request, which it is told; and why the
    request ends with the last of them, if it does."""
    found: list[int] = []
    finish = None
    while finish is None and (forced := grammar.forced_tokens()):
        kept, finish = up_to_end(request, num_known + len(found), forced)
        grammar.accept(kept)
        found += kept
    return found, finish


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
