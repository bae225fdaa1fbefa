"""The node's end of the connection to the head, against a real desk."""

import queue
import threading
import time

import pytest

from pagemill.errors import ConfigError, EngineDeadError
from pagemill.fleet.head import NodeRegistry
from pagemill.fleet.node import HeadConnection
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import EngineDown, EngineStalled, EngineUp
from pagemill.messages.nodes import NodeHello
from pagemill.transport.addresses import free_port, tcp_address

UP = EngineUp(1, 0, "tcp://10.0.0.2:7", EngineReady(max_model_len=64, vocab_size=100, num_blocks=10, block_size=4))

AGAIN = EngineUp(1, 1, "tcp://10.0.0.2:8", UP.ready)


class Case:
    """A port, a link to it that runs on a thread, and desks that come and go there."""

    def __init__(self, timeout_s=30.0, secret="s", settings=()):
        self.address = tcp_address(port=free_port())
        hello = NodeHello("a", "node-a", 2, 1, 1, dict(settings))
        self.link = HeadConnection(self.address, secret, hello, timeout_s, return_s=timeout_s)
        self.events = queue.SimpleQueue()
        self.end = queue.SimpleQueue()
        self.desk = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.link.connect(20)
            self.link.run()
            self.end.put(None)
        except Exception as error:
            self.end.put(error)
        finally:
            self.link.close()

    def open_desk(self):
        self.desk = NodeRegistry(self.address, "s", range(1, 2), 2, {}, self.events.put, 30)

    def start(self):
        self.thread.start()
        return self

    def ended(self):
        return self.end.get(timeout=20)

    def next(self):
        return self.events.get(timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.link.stop()
        if self.thread.is_alive():
            self.thread.join(20)
        if self.desk is not None:
            self.desk.close()


@pytest.mark.slow
def test_a_node_may_be_there_before_its_head_and_ends_with_it():
    with Case() as case:
        case.start()
        case.link.publish(UP)
        time.sleep(0.3)
        case.open_desk()
        assert case.next() == UP
        case.desk.close()
        assert case.ended() is None


def test_a_node_that_is_stopped_says_so():
    with Case() as case:
        case.open_desk()
        case.start().link.publish(UP)
        assert case.next() == UP
        case.link.stop()
        assert case.ended() is None
        assert case.next().reason == "its node node-a is gone: it was told to stop"


def test_a_node_without_engines_ends_with_the_reason():
    with Case() as case:
        case.open_desk()
        case.start().link.publish(UP)
        case.next()
        case.link.publish(EngineDown(1, 0, "exit status 3", final=True))
        assert isinstance(case.next(), EngineDown)
        error = case.ended()
        assert isinstance(error, EngineDeadError)
        assert "no engine of this node is left: exit status 3" in str(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"secret": "t"}, "this node cannot join: .*is it the same there", marks=pytest.mark.slow),
        ({"settings": {"dtype": "x"}}, "refused this node: dtype is x on the node and None on the head"),
    ],
)
def test_a_refusal_ends_the_node(arguments, message):
    with Case(**arguments) as case:
        case.open_desk()
        error = case.start().ended()
        assert isinstance(error, ConfigError)
        with pytest.raises(ConfigError, match=message):
            raise error


@pytest.mark.slow
def test_a_head_that_vanishes_ends_the_node_after_a_while():
    with Case(timeout_s=1.0) as case:
        case.open_desk()
        case.start().link.publish(UP)
        case.next()
        case.desk._nodes.clear()  # it hears nothing and says nothing any more
        case.desk.close()
        started = time.monotonic()
        error = case.ended()
        assert isinstance(error, EngineDeadError)
        assert "there is no head at" in str(error)
        assert 0.9 < time.monotonic() - started < 10


@pytest.mark.slow
def test_a_head_that_took_the_node_for_gone_is_told_again_what_there_is():
    with Case(timeout_s=2.0) as case:
        case.open_desk()
        case.start().link.publish(UP)
        case.next()
        case.desk._nodes.clear()
        assert case.next() == EngineUp(1, 1, UP.address, UP.ready), "another incarnation: connections are made anew"


@pytest.mark.slow
def test_a_head_that_is_started_again_gets_the_engines_that_there_are():
    with Case() as case:
        case.open_desk()
        case.start().link.publish(UP)
        assert case.next() == UP
        case.desk._nodes.clear()  # so that it ends without a word
        case.desk.close()
        time.sleep(1.0)
        case.link.publish(EngineDown(1, 0, "boom"))
        case.link.publish(AGAIN)
        case.link.publish(EngineStalled(1, 1, True))
        time.sleep(2.0)
        case.open_desk()
        assert [case.next(), case.next()] == [AGAIN, EngineStalled(1, 1, True)]


@pytest.mark.slow
def test_nobody_there_is_an_error_after_the_patience():
    with Case() as case, pytest.raises(EngineDeadError, match=r"there is no head at tcp://127.0.0.1:\d+: "):
        case.link.connect(0)
