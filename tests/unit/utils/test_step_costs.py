"""What a step costs by its number of tokens, learnt from steps."""

import numpy as np
import pytest

from pagemill.utils.step_costs import FIRST_MEMORY, KNOTS, MEMORY, StepCosts


def at(costs, *counts):
    """Estimates of steps with so many tokens."""
    return np.array([costs.seconds(count, count)[0] for count in counts])


def curve(num_tokens):
    """Seconds; a kink where a tile is full."""
    return 0.01 + 0.0005 * num_tokens + (0.004 if num_tokens > 4 else 0)


def test_before_anything_is_measured_more_tokens_cost_more():
    costs = StepCosts()
    found = costs.seconds(1, 600)
    assert len(found) == 600
    assert found[4:8] == costs.seconds(5, 8)
    assert found[-2:] == costs.seconds(599, 600)
    assert (np.diff(found) > 0).all()
    assert costs.num_steps == 0


def test_arrays_are_the_lists():
    costs = StepCosts()
    for num_tokens in (1, 5, 9, 300):
        costs.add(num_tokens, curve(num_tokens))
    for fewest, most in ((1, 600), (7, 7), (513, 700), (40, 512)):
        np.testing.assert_allclose(costs.array(fewest, most), costs.seconds(fewest, most), rtol=1e-12)


def test_one_step_sets_the_scale_of_all():
    costs = StepCosts()
    before = at(costs, 1, 5, 64) / at(costs, 1)
    costs.add(1, 0.02)
    assert at(costs, 1) == pytest.approx(0.02)
    assert at(costs, 1, 5, 64) / at(costs, 1) == pytest.approx(before)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_estimates_come_to_what_is_measured(noise):
    rng = np.random.default_rng(3)
    costs = StepCosts()
    for _ in range(40):
        for count in (1, 2, 3, 5, 9, 14, 66, 100):
            costs.add(count, curve(count) * (1 + noise * rng.standard_normal()))
    for count in (1, 2, 3, 5, 9, 66, 100):
        assert at(costs, count) == pytest.approx(curve(count), rel=0.03 + noise)


def test_a_slow_step_moves_little_and_more_tokens_never_cost_less():
    costs = StepCosts()
    for _ in range(20):
        costs.add(1, 0.01)
        costs.add(8, 0.02)
    costs.add(1, 5.0)
    assert at(costs, 1) < 0.011
    costs.add(2, 0.5)
    found = costs.seconds(1, 100)
    assert (np.diff(found) >= 0).all()


def test_what_no_step_confirms_is_forgotten():
    costs = StepCosts()
    costs.add(1, 0.01)
    for _ in range(3):
        costs.add(5, 0.05)
    for _ in range(MEMORY - 1):
        costs.add(1, 0.01)
    assert at(costs, 5) == pytest.approx(0.05)
    costs.add(1, 0.01)
    assert at(costs, 5) < 0.02


def test_what_a_single_step_said_is_forgotten_sooner_and_later_each_time():
    """Something else may have slowed it."""
    costs = StepCosts()
    waits = []
    for _ in range(5):
        costs.add(5, 1.0)
        assert at(costs, 5) == pytest.approx(1.0)
        waits.append(0)
        while at(costs, 5) > 0.02:
            costs.add(1, 0.01)
            waits[-1] += 1
    assert waits == [FIRST_MEMORY, 2 * FIRST_MEMORY, 4 * FIRST_MEMORY, MEMORY, MEMORY]


@pytest.mark.parametrize(("count", "seconds"), [(0, 1.0), (KNOTS[-1] + 1, 1.0), (4, 0.0), (4, -1.0)])
def test_what_says_nothing_is_left_out(count, seconds):
    costs = StepCosts()
    costs.add(count, seconds)
    assert costs.num_steps == 0


def test_beyond_the_last_knot_it_grows():
    costs = StepCosts()
    costs.add(KNOTS[-1], 1.0)
    assert at(costs, 2 * KNOTS[-1]) > 1.9
