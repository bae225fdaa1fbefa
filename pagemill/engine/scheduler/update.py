"""What became of sampled tokens: which requests they end and why, and what the front end is told.

Knows nothing about blocks, queues or the next step.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.engine.request import RequestStatus
from pagemill.engine.scheduler.limits import IntArray
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.messages.engine_io import EngineCoreOutput, Finish, FinishReason
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.step import NO_TOKEN

BoolArray = npt.NDArray[np.bool_]

FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}
POOLED = Finish(FinishReason.STOP)
"""The end of a pooling request that got its vector."""


NOT_FINITE = "the model returned NaN or infinite values for this request"
FAILED = Finish(FinishReason.ERROR, message=NOT_FINITE)


def ends_at_once(states: SlotStates, slots: IntArray, token_ids: IntArray) -> tuple[BoolArray, BoolArray]:
    """[L] whether each slot's sampled token is a stop id that counts, and [L] whether there is none. Called before the
    tokens are appended."""
    hits: BoolArray = (states.stop_ids[slots] == token_ids[:, None]).any(axis=1)
    if states.many_stop_ids:
        for row in np.flatnonzero(np.isin(slots, list(states.many_stop_ids))).tolist():
            hits[row] |= token_ids[row] in states.many_stop_ids[slots[row]]
    if not hits.any():
        return hits, hits
    failed = token_ids == NO_TOKEN
    return hits & ~failed & (states.num_known[slots] >= states.stop_from[slots]), failed


def ends_by_length(states: SlotStates, slots: IntArray) -> BoolArray:
    """[L] whether each slot has all tokens it may have. Called after the tokens are appended."""
    return states.num_known[slots] >= states.length_limit[slots]


def apply_tokens(states: SlotStates, slots: IntArray, token_ids: IntArray) -> dict[int, Finish]:
    """Append one sampled token to each of [L] slots that has one. Returns position in [L] -> why the request ends."""
    stopped, failed = ends_at_once(states, slots, token_ids)
    if failed.any():
        states.append(slots[~failed], token_ids[~failed])
    else:
        states.append(slots, token_ids)
    ended = stopped | failed | ends_by_length(states, slots)
    if not ended.any():
        return {}

    def why(row: int) -> Finish:
        if failed[row]:
            return FAILED
        return Finish(FinishReason.STOP, int(token_ids[row])) if stopped[row] else Finish(FinishReason.LENGTH)

    return {row: why(row) for row in np.flatnonzero(ended).tolist()}


def report_pooled(states: SlotStates, slots: IntArray, vectors: npt.NDArray[np.float32]) -> list[EngineCoreOutput]:
    """What the front end is told about [L] slots whose prompts became [L, E] vectors, which ends their requests."""
    outputs = []
    for slot, vector in zip(slots.tolist(), vectors, strict=True):
        request = states.occupant(slot)
        length = request.params.dimensions if isinstance(request.params, PoolingParams) else None
        failed = not np.isfinite(vector).all()
        outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                pooled=None if failed else vector[:length],
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


def report(states: SlotStates, slots: IntArray, token_ids: IntArray, finished: dict[int, Finish]) -> StepReport:
    """What the front end is told about [L] slots and their new tokens. Called before finished slots are released."""
    first = states.unannounced[slots]
    if not finished and not first.any():
        return StepReport(states.request_ids[slots].tolist(), token_ids.tolist(), [])
    plain = ~first
    plain[list(finished)] = False
    outputs = []
    for row in np.flatnonzero(~plain).tolist():
        request = states.occupant(int(slots[row]))
        outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[] if finished.get(row) is FAILED else [int(token_ids[row])],
                finish=finished.get(row),
                num_cached_tokens=request.num_cached_tokens if first[row] else None,
                queued_at=request.queued_at if first[row] else None,
                scheduled_at=request.scheduled_at if first[row] else None,
            )
        )
    states.unannounced[slots] = False
    return StepReport(states.request_ids[slots[plain]].tolist(), token_ids[plain].tolist(), outputs)
