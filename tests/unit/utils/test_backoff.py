"""Pauses between attempts."""

from pagemill.utils.backoff import Backoff


def test_pauses_grow_to_a_limit():
    backoff = Backoff(1, 5)
    assert [backoff.next_s() for _ in range(4)] == [1, 2, 4, 5]
    backoff.reset()
    assert backoff.next_s() == 1
