from concurrent.futures import Future

import pytest

from pagemill.messages.pending import OnThread, Ready


def test_a_value_that_is_there_is_the_same_at_every_call():
    value = [1, 2]
    pending = Ready(value)
    assert pending.ready()
    assert pending.result() is value
    assert pending.result() is value


def test_a_value_of_another_thread_is_there_when_the_work_is_done():
    future = Future()
    pending = OnThread(future)
    assert not pending.ready()
    future.set_result(5)
    assert pending.ready()
    assert (pending.result(), pending.result()) == (5, 5)


def test_what_the_work_raised_is_raised():
    future = Future()
    future.set_exception(ValueError("no"))
    pending = OnThread(future)
    assert pending.ready()
    with pytest.raises(ValueError, match="no"):
        pending.result()
