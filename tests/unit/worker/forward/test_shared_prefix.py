"""What all requests of a decode batch have in the same blocks."""

import types

import numpy as np
import pytest

from pagemill.worker.batch.block_tables import BlockTable
from pagemill.worker.forward.shared_prefix import SharedPrefix, equal_columns

BLOCKS = np.array([[5, 6, 7, 8], [5, 6, 9, 8], [5, 6, 7, 8], [4, 6, 7, 8]], np.int32)


@pytest.mark.parametrize(
    ("rows", "width", "count"),
    [([0, 2], 4, 4), ([0, 2], 3, 3), ([0, 1, 2], 4, 2), ([0, 1, 2], 1, 1), ([0, 3], 4, 0), ([1], 4, 4), ([0, 2], 0, 0)],
)
def test_equal_columns(rows, width, count):
    assert equal_columns(BLOCKS, np.array(rows, np.int32), width) == count


class Groups:
    """Two groups, of which the second makes use of 32 tokens that three requests share."""

    indices = (0, 1)

    def cascades(self, index, prefix_len, num_requests):
        return index == 1 and prefix_len >= 32 and num_requests >= 3


@pytest.mark.parametrize(
    ("slots", "positions", "found"),
    [
        ([0, 1, 2], [50, 40, 60], (0, 32)),
        ([0, 1, 2], [50, 32, 60], (0, 32)),  # the third block of the second request is computed in this step
        ([0, 1, 2], [50, 31, 60], ()),  # so is its second
        ([0, 2], [64, 64], ()),
        ([0, 1, 3], [50, 40, 60], ()),
    ],
)
def test_only_what_was_computed_counts_where_attention_makes_use_of_it(slots, positions, found):
    tables = [BlockTable(4, 64, 16) for _ in range(2)]
    for table in tables:
        for slot, row in enumerate(BLOCKS):
            table.append(slot, row.tolist())
    batch = types.SimpleNamespace(slots=np.array(slots, np.int32), positions=np.array(positions))
    assert SharedPrefix(tables, Groups()).tokens(batch) == found
