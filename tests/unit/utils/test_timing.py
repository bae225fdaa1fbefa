"""The phase timer."""

from pagemill.utils.timing import PhaseTimer


def test_phases_are_listed_in_order_and_add_up():
    timer = PhaseTimer()
    for name in ("b", "a", "b"):
        with timer.phase(name):
            pass
    assert list(timer.seconds) == ["b", "a"]
    assert timer.summary().startswith("b 0.00 s, a 0.00 s, total")
