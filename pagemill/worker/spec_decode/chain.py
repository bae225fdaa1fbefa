"""What proposers have in common that guess one token after another with a network of their own: arrays of their steps,
and how far they may go."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.messages.step import Int32Array
from pagemill.worker.batch.input_batch import InputBatch, Int64Array
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.spec_decode.interface import DraftNetwork

NO_ROW = -1


def step_batch(
    slots: Int32Array, token_ids: Int64Array, starts: Int32Array, ends: Int32Array, last: npt.NDArray[np.bool_]
) -> InputBatch:
    """A step of [R] slots, each from one position to before another; `token_ids` [T]; `last` [R]: the slots whose last
    row is asked for."""
    counts = ends - starts
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    token_slots = np.repeat(slots, counts)
    positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
    rows = (query_start[1:][last] - 1).astype(np.int64)
    return InputBatch(
        step_id=-1,
        slots=slots,
        token_slots=token_slots,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        seq_lens=ends.astype(np.int32),
        logits_index=rows,
        sampled_slots=slots[last],
        sampled_positions=positions[rows] + 1,
    )


class FollowedStep(NamedTuple):
    """What a step of the model has computed for good, as a step of who reads its hidden states."""

    slots: Int32Array
    """[R] those of which there is something."""
    starts: Int32Array
    ends: Int32Array
    """[R] from one position to before another."""
    rows: npt.NDArray[np.bool_]
    """Which rows of the model's step these are."""
    last: npt.NDArray[np.bool_]
    """[R] the slots of which all is computed but the last token."""


def followed(given: InputBatch, slots: Int32Array, states: RequestStates, network: DraftNetwork) -> FollowedStep | None:
    """Of a step of these [R] slots: not what it has of drafts that were wrong, nor of what there is no room for. None:
    nothing."""
    starts = given.positions[given.query_start[:-1]].astype(np.int32)
    ends = np.minimum(states.num_computed[slots], rooms(network, slots))
    runs = ends > starts
    if not runs.any():
        return None
    last = ends == states.num_tokens[slots] - 1
    rows = given.positions < np.repeat(np.maximum(ends, starts), np.diff(given.query_start))
    return FollowedStep(slots[runs], starts[runs], ends[runs], rows, last[runs])


def rooms(network: DraftNetwork, slots: Int32Array) -> Int32Array:
    """[R] first positions of each slot that may be computed: blocks hold them, and the network knows so many."""
    room: Int32Array = np.full(len(slots), network.max_model_len, np.int32)
    for index in network.groups.indices:
        table = network.tables.groups[index]
        room = np.minimum(room, table.num_blocks[slots] * table.block_size)
    return room


def sound_drafts(which: Int64Array, drafts: Int32Array, count: int) -> list[Int32Array]:
    """Which of so many slots have [L, drafts] of a device -> drafts of each slot, up to the first that is none."""
    found: list[Int32Array] = [drafts[:0, 0]] * count
    lengths = np.logical_and.accumulate(drafts >= 0, axis=1).sum(axis=1)
    for index, row, length in zip(which.tolist(), drafts, lengths.tolist(), strict=True):
        found[index] = row[:length]
    return found
