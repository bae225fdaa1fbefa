"""Both histories say the same of the same tokens: given, sampled, appended in any order of rows, in recycled slots."""

import numpy as np
import pytest
import torch

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling.history import DeviceHistory, HostHistory

VOCAB, SLOTS = 31, 12


class Both:
    """Slots that both histories are told of, and what they should say."""

    def __init__(self):
        self.states = RequestStates(SLOTS, 2000)
        self.histories = [HostHistory(self.states, VOCAB), DeviceHistory(SLOTS, VOCAB, torch.device("cpu"))]
        self.rng = np.random.default_rng(0)

    def add(self, slot, num_prompt, num_generated=0):
        ids = self.rng.integers(0, VOCAB, num_prompt + num_generated).astype(np.int32)
        new = NewRequest(str(slot), slot, ids, num_prompt, 0, ([1],), SamplingParams())
        self.states.add(new)
        for history in self.histories:
            history.watch(new)

    def rows(self, slots):
        slots = np.array(slots, np.int32)
        return SampledRows(slots, self.states.num_tokens[slots].astype(np.int64))

    def sample(self, slots):
        rows = self.rows(slots)
        tokens = self.rng.integers(0, VOCAB, len(rows)).astype(np.int32)
        for history in self.histories:
            history.append(rows, torch.from_numpy(tokens))
        self.states.append(rows.slots, tokens)

    def check(self, slots):
        rows = self.rows(slots)
        counts, seen = np.zeros((len(rows), VOCAB), int), np.zeros((len(rows), VOCAB), bool)
        for row, slot in enumerate(slots):
            ids = self.states.token_ids[slot, : self.states.num_tokens[slot]]
            counts[row] = np.bincount(ids[self.states.num_prompt_tokens[slot] :], minlength=VOCAB)
            seen[row, ids] = True
        for history in self.histories:
            np.testing.assert_array_equal(history.output_counts(rows).numpy(), counts)
            np.testing.assert_array_equal(history.seen(rows).numpy(), seen)


def test_rows_of_drafts_see_the_tokens_before_them():
    """A slot of three rows: its two drafts, of which the second is wrong; then its next row."""
    states = RequestStates(SLOTS, 2000)
    history = DeviceHistory(SLOTS, VOCAB, torch.device("cpu"), counts_ahead=False)
    new = NewRequest("a", 5, np.array([1, 2, 3], np.int32), 2, 0, ([1],), SamplingParams())
    states.add(new)
    history.watch(new)
    rows = SampledRows(np.array([5, 5, 5], np.int32), np.array([3, 4, 5]))
    history.expect(rows, torch.tensor([7, 8, -2]))
    counts = history.output_counts(rows)
    assert [np.flatnonzero(row).tolist() for row in counts.numpy()] == [[3], [3, 7], [3, 7, 8]]
    assert history.last_outputs(rows, 2).tolist() == [[-1, 3], [3, 7], [7, 8]]
    history.append(rows, torch.tensor([7, 9, 4]))
    after = SampledRows(np.array([5], np.int32), np.array([5]))
    assert history.last_outputs(after, 3).tolist() == [[3, 7, 9]]
    assert history.seen(after)[0].nonzero().flatten().tolist() == [1, 2, 3, 7, 9]


@pytest.fixture
def both():
    return Both()


def test_they_grow_with_what_is_sampled(both):
    for slot, length in enumerate((1, 7, 40)):
        both.add(slot, length)
    both.check([0, 1, 2])
    for slots in ([2, 0], [1], [0, 1, 2], [2]):
        both.sample(slots)
        both.check([0, 1, 2])
        both.check([2, 0])


def test_a_resumed_request_has_output_already(both):
    both.add(3, 5, num_generated=4)
    both.check([3])
    both.sample([3])
    both.check([3])


def test_a_recycled_slot_begins_anew(both):
    both.add(0, 900)
    both.add(1, 3)
    both.sample([0, 1])
    for history in both.histories:
        history.forget(0)
    both.add(0, 2)
    both.sample([1, 0])
    both.check([0, 1])
    both.add(1, 1)  # without being released
    both.check([1, 0])


def test_there_is_room_for_all_slots_and_long_prompts(both):
    for slot in range(SLOTS):
        both.add(slot, 1 + 150 * slot)
    both.sample(list(range(SLOTS)))
    both.check(list(range(SLOTS)))


def test_a_row_without_a_token_goes_on_with_token_0():
    history = DeviceHistory(1, VOCAB, torch.device("cpu"))
    history.watch(NewRequest("a", 0, np.array([4], np.int32), 1, 0, ([1],), SamplingParams()))
    history.append(SampledRows(np.array([0]), np.array([1])), torch.tensor([-1]))
    counts = history.output_counts(SampledRows(np.array([0]), np.array([2])))
    assert counts.nonzero().tolist() == [[0, 0]]
