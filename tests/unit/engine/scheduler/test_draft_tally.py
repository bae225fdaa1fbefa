"""What became of drafts is counted by their place."""

import numpy as np

from pagemill.engine.scheduler.draft_tally import DraftTally
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
