"""Pauses between attempts that fail."""

from pagemill.utils.pauses import GrowingPause


def test_pauses_grow_to_a_limit_and_a_success_ends_them():
    pause = GrowingPause()
    assert [pause.next_s(False) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert pause.next_s(True) == 0
    assert [pause.next_s(False) for _ in range(2)] == [1, 2]
