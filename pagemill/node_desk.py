"""`NodeDesk`: where machines that have engines only report to the head, and what becomes of their engines is published.

Does not know how engines are started, nor who listens to the news. The other side is headless.py.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from pagemill.errors import PeerGoneError, TransportError
from pagemill.log import get_logger
from pagemill.messages.fleet import EngineDown, EngineLoadReport, EngineStalled, EngineUp, FleetEvent
from pagemill.messages.nodes import (
    HeadGoodbye,
    HeadMessage,
    HeadPulse,
    NodeGoodbye,
    NodeHello,
    NodeMessage,
    NodePulse,
    NodeRefused,
    NodeWelcome,
)
from pagemill.transport.codec import Codec, Frame
from pagemill.transport.handshake import Role
from pagemill.transport.sockets import Peer, ServerSocket
from pagemill.utils.awake_clock import AwakeClock

logger = get_logger(__name__)

PULSE_S = 0.5
MAX_GAP_S = 2.0
"""Between two looks at the nodes. A longer gap tells that this process itself did not run."""


@dataclass
class _Node:
    """A node that was welcomed."""

    hello: NodeHello
    ranks: range
    first_incarnations: dict[int, int]
    """Engine -> what its incarnation 0 on this node is called here."""
    last_heard: float
    ups: dict[int, int] = field(default_factory=dict)
    """Engines that are up -> incarnation, as it is called here."""


class NodeDesk:
    """Listens for nodes on a thread of its own, until `close`.

    `ranks` are the engines that nodes may have, of `size` in all, and `settings` those that a node must share.
    `publish` is called on the desk's thread. Engines of a node that comes back count on where the last ones ended, so
    that news of the former are not taken for theirs. Raises ConfigError when the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        ranks: range,
        size: int,
        settings: Mapping[str, str],
        publish: Callable[[FleetEvent], None],
        timeout_s: float,
    ) -> None:
        self._ranks, self._size, self._settings = ranks, size, settings
        self._publish = publish
        self._timeout_s = timeout_s
        self._clock = AwakeClock(MAX_GAP_S)
        self._socket = ServerSocket(address, secret, accepts=(Role.NODE,))
        self.address = self._socket.address
        self._said: Codec[NodeMessage] = Codec(NodeMessage)
        self._answers: Codec[HeadMessage] = Codec(HeadMessage)
        self._nodes: dict[Peer, _Node] = {}
        self._next_incarnations = dict.fromkeys(ranks, 0)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pagemill-nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the nodes that the server ends. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._socket.wake()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        next_pulse = 0.0
        while not self._closing:
            self._clock.now()  # so that it runs also while there are no nodes
            received = self._socket.receive(PULSE_S)
            if received is not None:
                self._hear(*received)
            if time.monotonic() >= next_pulse:
                next_pulse = time.monotonic() + PULSE_S
                self._look_after_nodes()
        for peer in list(self._nodes):
            self._send(peer, HeadGoodbye())

    def _hear(self, peer: Peer, frames: list[Frame]) -> None:
        try:
            message = self._said.decode(frames)
        except TransportError as error:
            logger.warning("dropped a message of %s: %s", peer, error)
            return
        node = self._nodes.get(peer)
        if isinstance(message, NodeHello):
            self._answer(peer, message)
        elif node is None:
            logger.debug("%s is not welcome, and speaks", peer)
        elif isinstance(message, NodeGoodbye):
            self._lose(peer, message.reason)
        else:
            node.last_heard = self._clock.now()
            if not isinstance(message, NodePulse):
                self._forward(node, message)

    def _answer(self, peer: Peer, hello: NodeHello) -> None:
        problem = self._problem_with(hello)
        if problem is not None:
            logger.error("refused the node %s: %s", hello.name, problem)
            self._send(peer, NodeRefused(problem))
            self._socket.forget(peer)
            return
        ranks = range(hello.first_rank, hello.first_rank + hello.num_ranks)
        first = {rank: self._next_incarnations[rank] for rank in ranks}
        self._nodes[peer] = _Node(hello, ranks, first, self._clock.now())
        logger.info("the node %s has engines %s", hello.name, name_ranks(ranks))
        self._send(peer, NodeWelcome())

    def _problem_with(self, hello: NodeHello) -> str | None:
        """Why a node may not come in. One that has its ranks and is gone loses them now."""
        for name in sorted({*self._settings, *hello.settings}):
            there, here = hello.settings.get(name), self._settings.get(name)
            if there != here:
                return f"{name} is {there} on the node and {here} on the head"
        if hello.size != self._size:
            return f"data_parallel_size is {hello.size} on the node and {self._size} on the head"
        wanted = range(hello.first_rank, hello.first_rank + hello.num_ranks)
        if not wanted or wanted[0] not in self._ranks or wanted[-1] not in self._ranks:
            return (
                f"engines {name_ranks(wanted)} are not those of nodes, which are {name_ranks(self._ranks)}: "
                "check --data-parallel-start-rank and --data-parallel-size-local on both"
            )
        for peer, node in list(self._nodes.items()):
            if set(wanted) & set(node.ranks):
                if node.hello.node_id == hello.node_id:
                    self._lose(peer, "it connected anew")
                elif self._send(peer, HeadPulse()):
                    return f"engines {name_ranks(node.ranks)} run on the node {node.hello.name} already"
        return None

    def _forward(self, node: _Node, event: FleetEvent) -> None:
        """Publish an event as if the engine were here. One that a node gave up may come back with another node."""
        if event.index not in node.ranks:
            logger.warning("dropped news of engine %d, which is not the node %s's", event.index, node.hello.name)
            return
        if isinstance(event, EngineLoadReport):
            self._publish(event)
            return
        incarnation = node.first_incarnations[event.index] + event.incarnation
        self._next_incarnations[event.index] = max(self._next_incarnations[event.index], incarnation + 1)
        match event:
            case EngineUp():
                node.ups[event.index] = incarnation
                self._publish(msgspec.structs.replace(event, incarnation=incarnation))
            case EngineDown():
                node.ups.pop(event.index, None)
                self._publish(msgspec.structs.replace(event, incarnation=incarnation, final=False))
            case EngineStalled():
                self._publish(msgspec.structs.replace(event, incarnation=incarnation))

    def _look_after_nodes(self) -> None:
        for peer, node in list(self._nodes.items()):
            if self._clock.now() - node.last_heard > self._timeout_s:
                self._lose(peer, f"it was silent for {self._timeout_s:g} s")
            else:
                self._send(peer, HeadPulse())

    def _lose(self, peer: Peer, reason: str) -> None:
        """A node is gone, and its engines with it."""
        node = self._nodes.pop(peer)
        self._socket.forget(peer)
        logger.error("the node %s with engines %s is gone: %s", node.hello.name, name_ranks(node.ranks), reason)
        for rank, incarnation in node.ups.items():
            self._publish(EngineDown(rank, incarnation, f"its node {node.hello.name} is gone: {reason}"))

    def _send(self, peer: Peer, message: HeadMessage) -> bool:
        """Whether it is on its way. A node that cannot be reached is lost."""
        try:
            self._socket.send(peer, self._answers.encode(message))
        except PeerGoneError as error:
            if peer in self._nodes:
                self._lose(peer, str(error))
            return False
        return True


def name_ranks(ranks: range) -> str:
    """For people: 2 to 3."""
    return f"{ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else ", ".join(map(str, ranks)) or "(none)"
