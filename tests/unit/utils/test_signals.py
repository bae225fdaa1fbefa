"""Signals that would end a process as it stands."""

import os
import signal
import threading
import time

import pytest

from pagemill.utils.signals import LIKE_SIGTERM, no_sudden_end
from pagemill.utils.stacks import STACKS_SIGNAL


@pytest.fixture
def ended():
    """How often SIGTERM came."""
    times = []
    before = signal.signal(signal.SIGTERM, lambda *_: times.append(1))
    yield times
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", LIKE_SIGTERM)
def test_they_do_what_sigterm_does(number, ended):
    with no_sudden_end():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 10
        while not ended and time.monotonic() < deadline:  # another thread may take a signal, and this one hears of it
            time.sleep(0.01)
    assert 1 <= len(ended) <= 2
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_is_ignored_stays_ignored(ended):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with no_sudden_end():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not ended


def test_stacks_are_written(capfd):
    with no_sudden_end():
        os.kill(os.getpid(), STACKS_SIGNAL)
    assert "test_stacks_are_written" in capfd.readouterr().err


def test_other_threads_change_nothing():
    seen = []

    def look():
        with no_sudden_end():
            seen.append(signal.getsignal(signal.SIGHUP))

    before = signal.getsignal(signal.SIGHUP)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
