"""A front end waits for engines; what it is told meanwhile is not lost."""

import threading

from pagemill.fleet.api_server import FirstUps
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import EngineDown, EngineUp

READY = EngineReady(max_model_len=64, vocab_size=100, num_blocks=10, block_size=4)


def up(index, incarnation=0):
    return EngineUp(index, incarnation, f"address-{index}-{incarnation}", READY)


def waiting(ups):
    results = []
    thread = threading.Thread(target=lambda: results.append(ups.wait()), daemon=True)
    thread.start()
    return thread, results


def test_it_waits_until_something_is_known_of_every_engine():
    ups = FirstUps(2)
    thread, results = waiting(ups)
    ups(up(0))
    thread.join(0.05)
    assert thread.is_alive()
    ups(up(1))
    thread.join(60)
    assert results == [[up(0), up(1)]]


def test_an_engine_that_is_down_is_not_waited_for_but_one_must_be_up():
    """A front end that is started again while engine 1 is gone for good."""
    ups = FirstUps(2)
    thread, results = waiting(ups)
    ups(EngineDown(1, 4, "it failed to start", final=True))
    ups(EngineDown(0, 0, "killed by SIGKILL"))
    thread.join(0.05)
    assert thread.is_alive()
    ups(up(0, 1))
    thread.join(60)
    assert results == [[up(0, 1)]]


def test_the_listener_gets_what_came_before_and_after():
    ups, heard = FirstUps(1), []
    ups(up(0))
    ups(EngineDown(0, 0, "boom"))
    ups.hand_over(heard.append)
    ups(up(0, 1))
    assert heard == [up(0), EngineDown(0, 0, "boom"), up(0, 1)]
