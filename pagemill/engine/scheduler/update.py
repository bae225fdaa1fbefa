"""What became of sampled tokens: which requests they end and why, and what the front end is told.

Knows nothing about blocks, queues or the next step.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pagemill.engine.request import Request, RequestStatus
from pagemill.engine.scheduler.limits import IntArray
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.messages.engine_io import EngineCoreOutput, Finish, FinishReason
from pagemill.messages.logprobs import TokenLogprobs, joined
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NO_TOKEN, Int32Array, KnownLogprobs, ModelRunnerOutput

BoolArray = npt.NDArray[np.bool_]

FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}
POOLED = Finish(FinishReason.STOP)
"""The end of a pooling request that got its vector."""


NO_LOGPROBS: Mapping[int, TokenLogprobs] = {}
NO_DRAFTS: Mapping[int, tuple[int, int]] = {}
NOT_FINITE = (
    "no token could be sampled: the model returned NaN or infinite values for this request, or its own parameters "
    "exclude every token"
)
FAILED = Finish(FinishReason.ERROR, message=NOT_FINITE)


class SlotTokens(NamedTuple):
    """New tokens of [L] slots."""

    slots: IntArray
    token_ids: IntArray
    """[N] slot after slot."""
    counts: IntArray | None = None
    """[L] tokens of each slot; None: one each."""

    def rows(self, mask: BoolArray) -> "SlotTokens":
        """Those of some of the slots: [L] which."""
        if mask.all():
            return self
        if self.counts is None:
            return SlotTokens(self.slots[mask], self.token_ids[mask])
        return SlotTokens(self.slots[mask], self.token_ids[np.repeat(mask, self.counts)], self.counts[mask])

    def lists(self) -> list[list[int]]:
        """[L] the tokens of each slot."""
        flat = self.token_ids.tolist()
        if self.counts is None:
            return [[token] for token in flat]
        ends = np.cumsum(self.counts).tolist()
        return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def ends_at_once(
    states: SlotStates, slots: IntArray, token_ids: IntArray, num_known: IntArray
) -> tuple[BoolArray, BoolArray]:
    """[N] whether a token of a slot, before which it has `num_known`, is a stop id that counts; [N] whether there is
    no token."""
    hits: BoolArray = (states.stop_ids[slots] == token_ids[:, None]).any(axis=1)
    if states.many_stop_ids:
        for row in np.flatnonzero(np.isin(slots, list(states.many_stop_ids))).tolist():
            hits[row] |= token_ids[row] in states.many_stop_ids[slots[row]]
    if not hits.any():
        return hits, hits
    failed = token_ids == NO_TOKEN
    return hits & ~failed & (num_known >= states.stop_from[slots]), failed


def ends_by_length(states: SlotStates, slots: IntArray) -> BoolArray:
    """[L] whether each slot has all tokens it may have. Called after the tokens are appended."""
    return states.num_known[slots] >= states.length_limit[slots]


def apply_tokens(states: SlotStates, new: SlotTokens) -> tuple[SlotTokens, dict[int, Finish]]:
    """Append the tokens of [L] slots, up to the first that ends its request: by being a stop id or none, or as the last
    that the request may have. Returns what was appended, and position in [L] -> why the request ends."""
    if new.counts is not None:
        return _apply_several(states, new.slots, new.token_ids, new.counts)
    slots, token_ids, _ = new
    stopped, failed = ends_at_once(states, slots, token_ids, states.num_known[slots])
    if failed.any():
        states.append(slots[~failed], token_ids[~failed])
    else:
        states.append(slots, token_ids)
    ended = stopped | failed | ends_by_length(states, slots)
    if not ended.any():
        return new, {}
    if failed.any():
        new = SlotTokens(slots, token_ids[~failed], 1 - failed)
    return new, {row: _why(row, token_ids, stopped, failed) for row in np.flatnonzero(ended).tolist()}


def _apply_several(
    states: SlotStates, slots: IntArray, token_ids: IntArray, counts: IntArray
) -> tuple[SlotTokens, dict[int, Finish]]:
    """`apply_tokens` for any number of tokens of each slot, but at least one."""
    starts = np.cumsum(counts) - counts
    places = np.arange(len(token_ids)) - np.repeat(starts, counts)
    of_token = np.repeat(slots, counts)
    num_known = states.num_known[of_token] + places
    stopped, failed = ends_at_once(states, of_token, token_ids, num_known)
    ends = stopped | failed | (num_known + 1 >= states.length_limit[of_token])
    if not ends.any():
        states.append_several(slots, counts, token_ids)
        return SlotTokens(slots, token_ids, counts), {}
    first_end = np.minimum.reduceat(np.where(ends, places, len(token_ids)), starts)
    last = starts + np.minimum(first_end, counts - 1)
    kept = last - starts + 1 - failed[last]
    appended = SlotTokens(slots, token_ids[places < np.repeat(kept, counts)], kept)
    states.append_several(slots, kept, appended.token_ids)
    ended = np.flatnonzero(first_end < counts).tolist()
    return appended, {row: _why(int(last[row]), token_ids, stopped, failed) for row in ended}


def _why(index: int, token_ids: IntArray, stopped: BoolArray, failed: BoolArray) -> Finish:
    if failed[index]:
        return FAILED
    return Finish(FinishReason.STOP, int(token_ids[index])) if stopped[index] else Finish(FinishReason.LENGTH)


def check_counts(counts: Int32Array, least: int, most: IntArray | int, num_tokens: int) -> None:
    """Raise RuntimeError unless [L] counts of tokens are `least` to `most` each, and `num_tokens` together."""
    found = counts.tolist()
    allowed = [most] * len(found) if isinstance(most, int) else most.tolist()
    if sum(found) != num_tokens or any(
        not least <= count <= upper for count, upper in zip(found, allowed, strict=True)
    ):
        raise RuntimeError(
            f"the workers returned {num_tokens} tokens, {found} by slot; {least} to "
            f"{most if isinstance(most, int) else most.tolist()} each are allowed"
        )


def report_pooled(
    states: SlotStates, slots: IntArray, vectors: Sequence[npt.NDArray[np.float32]]
) -> list[EngineCoreOutput]:
    """What the front end is told about [L] slots whose prompts became [W] vectors, or [n, W] rows each, which ends
    their requests."""
    outputs = []
    for slot, vector in zip(slots.tolist(), vectors, strict=True):
        request = states.occupant(slot)
        width = request.params.width if isinstance(request.params, PoolingParams) else None
        failed = not np.isfinite(vector).all()
        outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                pooled=None if failed else vector[..., :width],
                finish=FAILED if failed else POOLED,
                num_cached_tokens=request.num_cached_tokens,
                queued_at=request.queued_at,
                scheduled_at=request.scheduled_at,
            )
        )
    return outputs


class StepReport(NamedTuple):
    """The outputs of a step: rows for requests that got one more token, objects for those with more to say."""

    request_ids: list[str]
    token_ids: list[int]
    outputs: list[EngineCoreOutput]


def note_known_logprobs(requests: Mapping[str, Request], parts: Sequence[KnownLogprobs]) -> None:
    """Keep them until an output of their request reports them. After a preemption the same tokens are computed again:
    what is known of them, also from steps that were in flight then, is not noted twice."""
    for part in parts:
        request = requests.get(part.request_id)
        if request is None:
            continue
        forced = part.start >= request.num_prompt_tokens
        missing = request.forced.unscored_from if forced else 1 + sum(map(len, request.prompt_logprobs))
        end = part.start + len(part.logprobs)
        if missing is None or not part.start <= missing < end:
            continue
        new = slice(missing - part.start, None)
        if not forced:
            request.prompt_logprobs.append(part.logprobs.rows(new))
        elif isinstance(request.params, SamplingParams):
            request.forced.logprobs.append(part.logprobs.rows(new, request.params.num_candidates))
            request.forced.unscored_from = end


def logprobs_by_slot(slots: IntArray, output: ModelRunnerOutput) -> dict[int, TokenLogprobs]:
    """Slot -> log-probabilities of the tokens that it sampled, for those that ask for them, of [L] slots of a step."""
    found = output.logprobs
    if found is None:
        return {}
    counts = np.ones(len(slots), np.int64) if output.counts is None else output.counts
    owners = np.repeat(slots, counts)[found.indices]
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    ends = [*starts[1:].tolist(), len(owners)]
    return {
        slot: found.logprobs.rows(slice(start, end))
        for slot, start, end in zip(owners[starts].tolist(), starts.tolist(), ends, strict=True)
    }


def drafts_by_slot(slots: IntArray, output: ModelRunnerOutput) -> Mapping[int, tuple[int, int]]:
    """Slot -> drafts that it verified, and how many of them were accepted, for those that had any, of [L] slots of a
    step."""
    verified = output.verified
    if verified is None:
        return NO_DRAFTS
    counts = [1] * len(slots) if output.counts is None else output.counts.tolist()
    rows = zip(slots.tolist(), verified.tolist(), counts, strict=True)
    return {slot: (num_drafts, count - 1) for slot, num_drafts, count in rows if num_drafts}


def report(
    states: SlotStates,
    new: SlotTokens,
    finished: dict[int, Finish],
    logprobs: Mapping[int, TokenLogprobs] = NO_LOGPROBS,
    drafts: Mapping[int, tuple[int, int]] = NO_DRAFTS,
) -> StepReport:
    """What the front end is told about [L] slots and their new tokens; by slot, `logprobs` of these tokens, and what
    became of `drafts`. Called before finished slots are released."""
    slots, token_ids, counts = new
    first = states.unannounced[slots]
    if not (finished or logprobs or drafts or first.any()) and counts is None:
        return StepReport(states.request_ids[slots].tolist(), token_ids.tolist(), [])
    plain = ~first if counts is None else ~first & (counts == 1)
    plain[list(finished)] = False
    if logprobs:
        plain &= ~np.isin(slots, list(logprobs))
    slot_ids = slots.tolist()
    if drafts:
        plain &= np.array([slot not in drafts for slot in slot_ids], np.bool_)
    outputs = []
    starts = None if counts is None else np.cumsum(counts) - counts
    for row in np.flatnonzero(~plain).tolist():
        slot = slot_ids[row]
        request = states.occupant(slot)
        start, count = (row, 1) if starts is None or counts is None else (int(starts[row]), int(counts[row]))
        tokens = token_ids[start : start + count].tolist()
        output = _report_one(request, tokens, finished.get(row), bool(first[row]), logprobs.get(slot))
        if slot in drafts:
            output = _with_drafts(output, *drafts[slot])
        outputs.append(output)
    states.unannounced[slots] = False
    rows = new.rows(plain)
    return StepReport(states.request_ids[rows.slots].tolist(), rows.token_ids.tolist(), outputs)


def _with_drafts(output: EngineCoreOutput, num_drafts: int, num_accepted: int) -> EngineCoreOutput:
    """With what became of drafts. Those behind the end of a request are no part of its output."""
    most = min(num_accepted, len(output.new_token_ids))
    return msgspec.structs.replace(output, num_drafts=num_drafts, num_accepted=most)


def _report_one(
    request: Request, tokens: list[int], finish: Finish | None, first: bool, logprobs: TokenLogprobs | None
) -> EngineCoreOutput:
    """The output of a request that has more to say than one token; `first`: it has had none before."""
    params = request.params
    if request.keeps_no_token:
        tokens = []
        finish = FAILED if finish is FAILED else Finish(FinishReason.LENGTH)
    if logprobs is not None and isinstance(params, SamplingParams):
        forced = request.forced.logprobs
        num_sampled = len(tokens) - sum(map(len, forced))
        logprobs = joined([*forced, logprobs.rows(slice(num_sampled), params.num_candidates)])
        request.forced.logprobs = []
    prompt_logprobs = None
    if first and request.prompt_logprobs:
        prompt_logprobs = joined(request.prompt_logprobs)
        request.prompt_logprobs = []  # nobody asks again, and the request may go on for long
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=tokens,
        finish=finish,
        num_cached_tokens=request.num_cached_tokens if first else None,
        queued_at=request.queued_at if first else None,
        scheduled_at=request.scheduled_at if first else None,
        logprobs=logprobs if tokens else None,
        prompt_logprobs=prompt_logprobs,
    )
