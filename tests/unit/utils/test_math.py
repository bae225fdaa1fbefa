"""Integer arithmetic."""

from pagemill.utils.math import ceil_div, round_up


def test_ceil_div():
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_round_up():
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
