"""Batches gathered from slots: the worked example of three prompts, and chunks that do not sample."""

import numpy as np

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest, SchedulerOutput
from pagemill.worker.batch.block_tables import BlockTable
from pagemill.worker.batch.input_batch import SlotRows, build_batch
from pagemill.worker.batch.request_states import RequestStates


def new_request(slot, token_ids, computed=0, blocks=()):
    return NewRequest(str(slot), slot, list(token_ids), len(token_ids), computed, (list(blocks),), SamplingParams())


def step_of(slots, counts):
    return SchedulerOutput(0, np.array(slots, np.int32), np.array(counts, np.int32))


def three_prompts():
    """Prompts of 5, 7 and 3 tokens with blocks of 4: 1,2 | 3,4 | 5."""
    states, table = RequestStates(4, 32), BlockTable(4, 32, block_size=4)
    for slot, (length, blocks) in enumerate([(5, [1, 2]), (7, [3, 4]), (3, [5])]):
        states.add(new_request(slot, range(10 * slot, 10 * slot + length)))
        table.reset(slot, blocks)
    return states, table


def test_the_worked_example_of_three_prompts():
    states, table = three_prompts()
    batch = build_batch(step_of([0, 1, 2], [5, 7, 3]), states)
    assert batch.query_start.tolist() == [0, 5, 12, 15]
    assert batch.token_ids.tolist() == [*range(5), *range(10, 17), *range(20, 23)]
    assert batch.positions.tolist() == [*range(5), *range(7), *range(3)]
    mapping = table.slot_mapping(batch.token_slots, batch.positions)
    assert mapping.tolist() == [*range(4, 9), *range(12, 19), *range(20, 23)]
    assert batch.logits_index.tolist() == [4, 11, 14]

    states.advance(batch.slots, np.array([5, 7, 3], np.int32))
    states.append(batch.sampled_slots, np.array([100, 101, 102], np.int32))
    batch = build_batch(step_of([0, 1, 2], [1, 1, 1]), states)
    assert table.slot_mapping(batch.token_slots, batch.positions).tolist() == [9, 19, 23]
    assert batch.token_ids.tolist() == [100, 101, 102]
    assert batch.seq_lens.tolist() == [6, 8, 4]
    assert batch.sampled_positions.tolist() == [6, 8, 4]


def test_a_prefill_chunk_samples_nothing_until_the_prompt_is_complete():
    states, _ = three_prompts()
    batch = build_batch(step_of([1, 0], [4, 5]), states)
    assert batch.sampled_slots.tolist() == [0]
    assert batch.logits_index.tolist() == [8]
    states.advance(batch.slots, np.array([4, 5], np.int32))
    batch = build_batch(step_of([1], [3]), states)
    assert batch.positions.tolist() == [4, 5, 6]
    assert batch.sampled_slots.tolist() == [1]


def test_a_cache_hit_starts_at_the_first_uncomputed_token():
    states = RequestStates(2, 32)
    states.add(new_request(1, range(9), computed=8))
    batch = build_batch(step_of([1], [1]), states)
    assert (batch.token_ids.tolist(), batch.positions.tolist(), batch.seq_lens.tolist()) == ([8], [8], [9])


def test_a_recycled_row_of_the_block_table_equals_a_fresh_one():
    table = BlockTable(2, 32, block_size=4)
    table.reset(0, [1, 2, 3])
    table.append(0, [4, 5])
    table.reset(0, [9])
    assert table.blocks[0].tolist() == [9, 0, 0, 0, 0, 0, 0, 0]
    table.append(0, [10])
    assert table.rows(np.array([0], np.int32), 8).tolist() == [[9, 10]]


def test_drafts_of_each_request_are_counted():
    states, _ = three_prompts()
    states.advance(np.array([0, 2]), np.array([4, 2], np.int32))
    states.fill(np.array([0, 0]), np.array([5, 6], np.int32), np.array([7, 8], np.int32))
    slots, counts = [2, 1, 0], np.array([1, 4, 3], np.int32)
    batch = build_batch(step_of(slots, counts), states, counts)
    assert batch.num_drafts.tolist() == [0, 0, 2]
    assert build_batch(step_of(slots, [1, 4, 1]), states).num_drafts is None


def test_the_rows_of_each_slot_that_samples():
    states = RequestStates(4, 32)
    for slot, length in ((0, 5), (2, 7), (3, 3)):
        states.add(new_request(slot, range(10 * slot, 10 * slot + length), computed=length - 1))
    for slots, counts in (([2, 0, 3], [3, 1, 2]), ([3], [4]), ([0, 2], [1, 1])):
        step = step_of(slots, counts)
        batch = build_batch(step, states, step.num_tokens)
        assert batch.known_rows is not None
        for found, expected in zip(batch.slot_rows, SlotRows.of(batch.sampled_slots), strict=True):
            assert found.tolist() == expected.tolist()
        assert batch.verifies == (max(counts) > 1)
        assert batch.token_ids.tolist() == states.token_ids[batch.token_slots, batch.positions].tolist()
        assert batch.sampled_positions.tolist() == (batch.positions + 1).tolist()
        assert batch.seq_lens.tolist() == (states.num_computed[slots] + counts).tolist()
    states.num_computed[3] = 0
    step = step_of([2, 3], [3, 3])
    mixed = build_batch(step, states, step.num_tokens)
    assert mixed.known_rows is None and mixed.verifies
    assert [part.tolist() for part in mixed.slot_rows] == [[2, 3], [0, 3], [3, 1]]
    assert [part.tolist() for part in SlotRows.of(np.zeros(0, np.int32))] == [[], [], []]
