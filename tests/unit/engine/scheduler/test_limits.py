"""How the budget is shared, and what shrinks a request's tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.scheduler.limits import SchedulerLimits, room_to_limit, share_budget, token_limits


@pytest.mark.parametrize(
    ("wanted", "budget", "granted"),
    [
        ([1, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 1], 2, [1, 1, 0]),
        ([10, 1, 1], 5, [3, 1, 1]),
        ([4, 4, 1], 6, [4, 1, 1]),
        ([4, 0, 4], 6, [4, 0, 2]),
        ([9], 4, [4]),
    ],
)
def test_single_tokens_come_before_chunks(wanted, budget, granted):
    assert share_budget(np.array(wanted), budget).tolist() == granted


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(0, 200))
def test_the_budget_is_spent_and_never_exceeded(wanted, budget):
    granted = share_budget(np.array(wanted), budget)
    assert granted.sum() == min(sum(wanted), budget)
    assert (granted <= np.array(wanted)).all()
    assert (granted >= 0).all()


def test_the_last_token_is_never_computed():
    assert room_to_limit(np.array([1, 1, 9]), np.array([8, 9, 4]), np.array([10, 10, 10])).tolist() == [1, 0, 5]


def test_the_threshold_counts_only_with_chunked_prefill():
    def limits(**options):
        return token_limits(SchedulerLimits(64, 8, 64, **options))

    assert len(limits(long_prefill_token_threshold=5)) == 2
    assert len(limits(long_prefill_token_threshold=5, enable_chunked_prefill=False)) == 1
    assert limits(long_prefill_token_threshold=5)[1](np.array([9, 2]), np.array([0]), np.array([0])).tolist() == [5, 2]
