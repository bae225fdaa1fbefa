"""Children that report, mumble and end; starts that fail; heartbeats."""

import queue

import msgspec
import pytest

from pagemill.utils.children import MAX_FAILED_STARTS, Restarts, WatchedChild, start_heartbeat
from pagemill.utils.processes import Child


def child(payload, report):
    """Reports the words of the payload, then ends with their number."""
    words = payload.decode().split()
    for word in words:
        report(b"\xc1 no report" if word == "mumble" else msgspec.msgpack.encode(word))
    raise SystemExit(len(words))


@pytest.mark.slow
def test_reports_come_in_order_until_the_end():
    started = Child("tests.unit.utils.test_children:child", "a child", b"one mumble two")
    watched = WatchedChild(started, msgspec.msgpack.Decoder(str), poll_s=10.0)
    assert not watched.has_reported
    assert list(watched.reports()) == ["one", None, "two"]
    assert watched.has_reported
    assert watched.end() == "exit status 3"


@pytest.mark.slow
def test_silence_lasts_from_the_start_or_the_last_report():
    started = Child("tests.unit.utils.test_children:child", "a child", b"one")
    watched = WatchedChild(started, msgspec.msgpack.Decoder(str), poll_s=0.05)
    silences = [watched.silent_s for report in watched.reports() if report is None]
    watched.end()
    assert silences[0] >= 0.05
    assert watched.silent_s >= 0


def test_starts_that_fail_are_repeated_with_growing_pauses_and_not_for_ever():
    restarts = Restarts()
    assert str(restarts.after_end(had_started=True)) == "starting it again"
    first, second = (restarts.after_end(had_started=False) for _ in range(2))
    assert (first.pause_s, first.num_failed_starts, str(second)) == (1.0, 1, "starting it again in 2 s")
    assert restarts.after_end(had_started=True).pause_s == 0
    ends = [restarts.after_end(had_started=False) for _ in range(MAX_FAILED_STARTS)]
    assert [end.is_final for end in ends] == [False] * (MAX_FAILED_STARTS - 1) + [True]
    assert max(end.pause_s for end in ends) == 30.0
    assert str(ends[-1]) == "it is given up"


def test_a_heart_beats_until_it_is_told_not_to():
    beats = queue.SimpleQueue()
    answers = iter([None, True, False])

    def beat():
        beats.put(1)
        return next(answers)

    start_heartbeat(beat, 0.001)
    assert [beats.get(timeout=60) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(queue.Empty):
        beats.get(timeout=0.05)
