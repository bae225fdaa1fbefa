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

BoolArray = npt.NDArray[np.bool_]

FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
}
POOLED = Finish(FinishReason.STOP)
"""The end of every pooling request that was not aborted."""


def ends_by_stop_id(states: SlotStates, slots: IntArray, token_ids: IntArray) -> BoolArray:
    """[L] whether each slot's sampled token is a stop id that counts. Called before the tokens are appended."""
    hits: BoolArray = (states.stop_ids[slots] == token_ids[:, None]).any(axis=1)
    if states.many_stop_ids:
        for row in np.flatnonzero(np.isin(slots, list(states.many_stop_ids))).tolist():
            hits[row] = token_ids[row] in states.many_stop_ids[slots[row]]
    if hits.any():
        hits &= states.num_known[slots] >= states.stop_from[slots]
    return hits


def ends_by_length(states: SlotStates, slots: IntArray) -> BoolArray:
    """[L] whether each slot has all tokens it may have. Called after the tokens are appended."""
    return states.num_known[slots] >= states.length_limit[slots]


def apply_tokens(states: SlotStates, slots: IntArray, token_ids: IntArray) -> dict[int, Finish]:
    """Append one sampled token to each of [L] slots. Returns position in [L] -> why the request ends."""
    stopped = ends_by_stop_id(states, slots, token_ids)
    states.append(slots, token_ids)
    ended = stopped | ends_by_length(states, slots)
    if not ended.any():
        return {}
    return {
        row: Finish(FinishReason.STOP, int(token_ids[row])) if stopped[row] else Finish(FinishReason.LENGTH)
        for row in np.flatnonzero(ended).tolist()
    }


def report_pooled(states: SlotStates, slots: IntArray, vectors: npt.NDArray[np.float32]) -> list[EngineCoreOutput]:
    """What the front end is told about [L] slots whose prompts became [L, E] vectors, which ends their requests."""
    outputs = []
    for slot, vector in zip(slots.tolist(), vectors, strict=True):
        request = states.occupant(slot)
        outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                pooled=vector[: request.params.dimensions] if isinstance(request.params, PoolingParams) else vector,
                finish=POOLED,
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
                new_token_ids=[int(token_ids[row])],
                finish=finished.get(row),
                num_cached_tokens=request.num_cached_tokens if first[row] else None,
                queued_at=request.queued_at if first[row] else None,
                scheduled_at=request.scheduled_at if first[row] else None,
            )
        )
    states.unannounced[slots] = False
    return StepReport(states.request_ids[slots[plain]].tolist(), token_ids[plain].tolist(), outputs)
