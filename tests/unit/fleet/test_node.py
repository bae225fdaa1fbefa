"""The node's end of the connection to the head, against a real registry."""

import contextlib
import queue
import threading
import time

import pytest

from pagemill.errors import ConfigError, EngineDeadError
from pagemill.fleet import node
from pagemill.fleet.head import NodeRegistry
from pagemill.fleet.node import HeadConnection
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import EngineDown, EngineStalled, EngineUp
from pagemill.messages.nodes import NodeHello, NodeMessage
from pagemill.transport.addresses import tcp_address
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.sockets import ClientSocket
from tests.fakes.ports import free_port

UP = EngineUp(1, 0, "tcp://10.0.0.2:7", EngineReady(max_model_len=64, vocab_size=100, num_blocks=10, block_size=4))

AGAIN = EngineUp(1, 1, "tcp://10.0.0.2:8", UP.ready)


class Case:
    """A port, a link to it that runs on a thread, and registries that come and go there."""

    def __init__(self, timeout_s=30.0, secret="s", settings=()):
        self.address = tcp_address(port=free_port())
        hello = NodeHello("a", "node-a", 2, 1, 1, dict(settings))
        self.link = HeadConnection(self.address, secret, hello, timeout_s, return_s=timeout_s)
        self.events = queue.SimpleQueue()
        self.end = queue.SimpleQueue()
        self.registry = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.link.connect(120)
            self.link.run()
            self.end.put(None)
        except Exception as error:
            self.end.put(error)
        finally:
            self.link.close()

    def open_registry(self, timeout_s=30):
        self.registry = NodeRegistry(self.address, "s", range(1, 2), 2, {}, self.events.put, timeout_s)

    def start(self):
        self.thread.start()
        return self

    def ended(self):
        return self.end.get(timeout=60)

    def next(self):
        return self.events.get(timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.link.stop()
        if self.thread.is_alive():
            self.thread.join(60)
        if self.registry is not None:
            self.registry.close()


@pytest.mark.slow
def test_a_node_may_be_there_before_its_head_and_ends_with_it():
    with Case() as case:
        case.start()
        case.link.publish(UP)
        time.sleep(0.3)
        case.open_registry()
        assert case.next() == UP
        case.registry.close()
        assert case.ended() is None


def test_a_node_that_is_stopped_says_so():
    with Case() as case:
        case.open_registry()
        case.start().link.publish(UP)
        assert case.next() == UP
        case.link.stop()
        assert case.ended() is None
        assert case.next().reason == "its node node-a is gone: it was told to stop"


def test_a_node_without_engines_ends_with_the_reason():
    with Case() as case:
        case.open_registry()
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
        case.open_registry()
        error = case.start().ended()
        assert isinstance(error, ConfigError)
        with pytest.raises(ConfigError, match=message):
            raise error


@pytest.mark.slow
def test_a_head_that_vanishes_ends_the_node_after_a_while():
    with Case(timeout_s=1.0) as case:
        case.open_registry()
        case.start().link.publish(UP)
        case.next()
        case.registry._nodes.clear()  # it hears nothing and says nothing any more
        case.registry.close()
        started = time.monotonic()
        error = case.ended()
        assert isinstance(error, EngineDeadError)
        assert "there is no head at" in str(error)
        assert 0.9 < time.monotonic() - started < 60


@pytest.mark.slow
def test_a_head_that_took_the_node_for_gone_is_told_again_what_there_is():
    with Case(timeout_s=2.0) as case:
        case.open_registry()
        case.start().link.publish(UP)
        case.next()
        case.registry._nodes.clear()
        assert case.next() == EngineUp(1, 1, UP.address, UP.ready), "another incarnation: connections are made anew"


@pytest.mark.slow
def test_a_head_that_is_started_again_gets_the_engines_that_there_are():
    with Case() as case:
        case.open_registry()
        case.start().link.publish(UP)
        assert case.next() == UP
        case.registry._nodes.clear()  # so that it ends without a word
        case.registry.close()
        time.sleep(1.0)
        case.link.publish(EngineDown(1, 0, "boom"))
        case.link.publish(AGAIN)
        case.link.publish(EngineStalled(1, 1, True))
        time.sleep(2.0)
        case.open_registry()
        assert [case.next(), case.next()] == [AGAIN, EngineStalled(1, 1, True)]


@pytest.mark.slow
def test_nobody_there_is_an_error_after_the_patience():
    with Case() as case, pytest.raises(EngineDeadError, match=r"there is no head at tcp://127.0.0.1:\d+: "):
        case.link.connect(0)


@contextlib.contextmanager
def predecessor(case):
    """Another node with the same engines, which falls silent without a word: its connection stays."""
    with contextlib.closing(
        ClientSocket(case.address, Hello(secret="s", role=Role.NODE, index=1), timeout_s=60)
    ) as socket:
        for message in (NodeHello("b", "node-b", 2, 1, 1, {}), UP):
            socket.send(Codec(NodeMessage).encode(message))
        assert case.next() == UP
        yield


@pytest.mark.slow
def test_a_node_that_restarts_at_once_waits_until_its_predecessor_is_known_to_be_gone():
    with Case(timeout_s=2.0) as case:
        case.open_registry(timeout_s=2.0)
        with predecessor(case):
            case.start().link.publish(UP)
            assert isinstance(case.next(), EngineDown)
            assert case.next() == EngineUp(1, 1, UP.address, UP.ready)


@pytest.mark.slow
def test_a_node_whose_engines_another_has_ends_after_a_while(monkeypatch):
    monkeypatch.setattr(node, "WAIT_MARGIN_S", 0.5)
    with Case(timeout_s=0.5) as case:
        case.open_registry()
        with predecessor(case):
            error = case.start().ended()
    assert isinstance(error, ConfigError)
    assert "the head refused this node: engines 1 run on the node node-b already" in str(error)
