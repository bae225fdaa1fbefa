"""What became of drafts is counted by their place."""

import numpy as np

from pagemill.engine.scheduler.draft_tally import FEW_SLOTS, DraftTally
from pagemill.messages.stats import DraftCounts


def array(*values):
    return np.array(values, np.int32)


def test_nothing_is_said_where_there_are_no_drafts():
    assert DraftTally().counts is None
    assert DraftTally(2).counts == DraftCounts(0, 0, (0, 0))


def test_each_place_counts_what_was_accepted_there():
    tally = DraftTally(2)
    tally.add(array(2, 0, 2), array(3, 1, 2))
    tally.add(array(1), None)
    assert tally.counts == DraftCounts(3, 5, (2, 1))
    tally.add(array(3), array(4))
    assert tally.counts == DraftCounts(4, 8, (3, 2, 1))
    assert tally.counts.num_accepted_tokens == 6


def test_many_slots_are_counted_as_few_are():
    rng = np.random.default_rng(0)
    verified = rng.integers(-2, 5, 3 * FEW_SLOTS).astype(np.int32)
    counts = 1 + np.maximum(rng.integers(0, 5, len(verified)).clip(max=verified), 0).astype(np.int32)
    whole, parts = DraftTally(2), DraftTally(2)
    for tokens in (counts, None):
        whole.add(verified, tokens)
        for some in np.split(np.arange(len(verified)), 9):
            parts.add(verified[some], None if tokens is None else tokens[some])
    assert whole.counts == parts.counts
    whole.add(np.zeros(2 * FEW_SLOTS, np.int32), np.ones(2 * FEW_SLOTS, np.int32))
    assert whole.counts == parts.counts
