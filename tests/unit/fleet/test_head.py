"""Nodes that come, report, contradict the head, go and come back."""

import queue
import re
import time

import pytest

from pagemill.errors import HandshakeError, NotLetInError
from pagemill.fleet.head import NodeRegistry, name_ranks
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import EngineDown, EngineLoadReport, EngineStalled, EngineUp
from pagemill.messages.nodes import (
    HeadGoodbye,
    HeadMessage,
    HeadPulse,
    NodeGoodbye,
    NodeHello,
    NodeMessage,
    NodeMustWait,
    NodePulse,
    NodeRefused,
    NodeWelcome,
)
from pagemill.messages.stats import SchedulerStats
from pagemill.transport.addresses import tcp_address
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.sockets import ClientSocket
from tests.marks import slow

READY = EngineReady(max_model_len=64, vocab_size=100, num_blocks=10, block_size=4)
SETTINGS = {"the model": "A 1", "dtype": "float32"}


class Registry:
    """A registry for engines 2 and 3 of 4, and what it published."""

    def __init__(self, timeout_s=300.0):
        self.events = queue.SimpleQueue()
        self.registry = NodeRegistry(tcp_address(), "s", range(2, 4), 4, SETTINGS, self.events.put, timeout_s)
        self.nodes = []

    def node(self, *args, **kwargs):
        self.nodes.append(Node(self.registry.address, *args, **kwargs))
        return self.nodes[-1]

    def next(self):
        return self.events.get(timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.registry.close()
        for node in self.nodes:
            node.socket.close()


class Node:
    """The other side, by hand."""

    def __init__(self, address, first=2, count=2, *, size=4, node_id="a", secret="s", settings=SETTINGS):
        self.said, self.heard = Codec(NodeMessage), Codec(HeadMessage)
        self.socket = ClientSocket(address, Hello(secret=secret, role=Role.NODE, index=first), timeout_s=60)
        self.say(NodeHello(node_id, f"node-{node_id}", size, first, count, settings))
        self.answer = self.hear(NodeWelcome, NodeRefused, NodeMustWait)

    def say(self, *messages):
        for message in messages:
            self.socket.send(self.said.encode(message))

    def hear(self, *kinds):
        deadline = time.monotonic() + 120
        while True:
            frames = self.socket.receive(deadline - time.monotonic())
            assert frames is not None, f"no {kinds}"
            message = self.heard.decode(frames)
            if isinstance(message, kinds):
                return message


def up(index, incarnation=0, address="tcp://10.0.0.2:7"):
    return EngineUp(index, incarnation, address, READY)


def test_events_of_a_node_are_published():
    with Registry() as registry:
        node = registry.node()
        assert node.answer == NodeWelcome()
        news = [
            up(2),
            EngineLoadReport(2, SchedulerStats(num_running=5, num_waiting=1)),
            EngineStalled(2, 0, True),
            EngineDown(2, 0, "boom"),
            up(2, 1),
        ]
        node.say(*news)
        assert [registry.next() for _ in news] == news
        assert node.hear(HeadPulse) == HeadPulse()


def test_an_engine_that_a_node_gives_up_may_come_back_with_another_node():
    with Registry() as registry:
        registry.node().say(EngineDown(3, 2, "boom", final=True))
        assert registry.next() == EngineDown(3, 2, "boom", final=False)


def test_what_is_not_the_nodes_is_dropped():
    with Registry() as registry:
        node = registry.node(2, 1)
        node.say(up(3), up(0))
        node.socket.send([b"garbage"])
        node.say(up(2))
        assert registry.next() == up(2)


@pytest.mark.parametrize("end", [slow("hang up"), "goodbye", slow("silence")])
def test_a_node_that_goes_takes_its_engines_with_it_and_may_come_back(end):
    with Registry(timeout_s=1.5 if end == "silence" else 300) as registry:
        node = registry.node()
        node.say(up(2, 4))
        registry.next()
        match end:
            case "hang up":
                node.socket.close()
            case "goodbye":
                node.say(NodeGoodbye("told to stop"))
        down = registry.next()
        assert (down.index, down.incarnation, down.final) == (2, 4, False)
        assert "node-a is gone" in down.reason
        again = registry.node(node_id="b")
        assert again.answer == NodeWelcome()
        again.say(up(2, 0), up(3, 0), EngineDown(2, 0, "boom"), up(2, 1))
        # Counted on, so that nobody takes news of the former engine for news of this one.
        assert [registry.next() for _ in range(4)] == [up(2, 5), up(3, 0), EngineDown(2, 5, "boom"), up(2, 6)]


@pytest.mark.slow
def test_a_node_that_pulses_is_not_silent():
    with Registry(timeout_s=4.0) as registry:
        node = registry.node()
        for _ in range(12):
            node.say(NodePulse())
            time.sleep(0.5)
        node.say(up(2))
        assert registry.next() == up(2)


def test_a_node_that_connects_anew_is_the_same_node():
    with Registry() as registry:
        registry.node().say(up(2), up(3))
        assert {registry.next().index, registry.next().index} == {2, 3}
        again = registry.node()
        assert again.answer == NodeWelcome()
        again.say(up(2), up(3), up(2, 1))
        assert registry.next() == up(2, 1), "nothing has become of its engines but what is new"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"settings": SETTINGS | {"the model": "B 2"}}, "the model is B 2 on the node and A 1 on the head"),
        ({"settings": {"the model": "A 1"}}, "dtype is None on the node and float32 on the head"),
        ({"size": 8}, "data_parallel_size is 8 on the node and 4 on the head"),
        ({"first": 1}, "engines 1 to 2 are not those of nodes, which are 2 to 3"),
        ({"first": 3}, "engines 3 to 4 are not those of nodes"),
        ({"count": 0}, r"engines \(none\) are not"),
    ],
)
def test_wrong_settings_are_refused_by_name(arguments, reason, caplog):
    with Registry() as registry:
        node = registry.node(**arguments)
        assert isinstance(node.answer, NodeRefused)
        assert re.search(reason, node.answer.reason)
        assert registry.node().answer == NodeWelcome()


def test_a_node_waits_for_engines_that_another_has(caplog):
    with Registry() as registry:
        registry.node(2, 1)
        for _ in range(3):
            waiting = registry.node(2, 2, node_id="b")
            assert waiting.answer == NodeMustWait("engines 2 run on the node node-a already")
        assert registry.node(3, 1, node_id="c").answer == NodeWelcome()
    assert caplog.text.count("the node node-b has to wait") == 1


@pytest.mark.slow
def test_a_node_that_restarts_before_its_loss_is_noticed_is_taken_once_it_is():
    with Registry(timeout_s=1.5) as registry:
        registry.node().say(up(2))  # silent from now on, and its connection stays
        assert registry.next() == up(2)
        assert isinstance(registry.node(node_id="b").answer, NodeMustWait)
        down = registry.next()
        assert (down.index, down.incarnation) == (2, 0)
        assert "it was silent for 1.5 s" in down.reason
        again = registry.node(node_id="b")
        assert again.answer == NodeWelcome()
        again.say(up(2))
        assert registry.next() == up(2, 1)


def test_another_secret_or_role_does_not_come_in():
    with Registry() as registry:
        with pytest.raises(NotLetInError, match="does not answer who has this secret"):
            ClientSocket(registry.registry.address, Hello(secret="t", role=Role.NODE, index=2), timeout_s=0.5)
        with pytest.raises(HandshakeError, match="not accepted here; allowed: node"):
            ClientSocket(registry.registry.address, Hello(secret="s", role=Role.API_SERVER, index=0), timeout_s=60)


def test_the_end_of_the_head_is_said():
    with Registry() as registry:
        node = registry.node()
        registry.registry.close()
        assert node.hear(HeadGoodbye) == HeadGoodbye()


def test_ranks_are_named_for_people():
    assert [name_ranks(range(2, 4)), name_ranks(range(2, 3)), name_ranks(range(2, 2))] == ["2 to 3", "2", "(none)"]
