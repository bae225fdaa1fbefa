"""`NodeRegistry`: the head's side of headless nodes: who is registered, and events about the engines that they run.

Does not know how engines are started, nor who reads the events. The other side is node.py.
"""

import contextlib
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
    NodeMustWait,
    NodePulse,
    NodeRefused,
    NodeWelcome,
)
from pagemill.transport.codec import Codec, Frame, Limits
from pagemill.transport.handshake import Role
from pagemill.transport.sockets import Peer, ServerSocket
from pagemill.utils.awake_clock import AwakeClock

logger = get_logger(__name__)

PULSE_S = 0.5
MAX_GAP_S = 2.0
"""Between two looks at the nodes. A longer gap tells that this process itself did not run."""
RETURN_S = 3.0
"""A node whose connection is lost makes another within two seconds, unless its process is gone."""
LIMITS = Limits(max_frames=16, max_frame_bytes=1 << 20, max_message_bytes=1 << 20)
"""Of the messages of nodes."""
MAX_REMEMBERED_WAITS = 100
"""Nodes that wait, of which the log has a line: more are not told apart."""


@dataclass
class _Node:
    """A node that was welcomed."""

    hello: NodeHello
    peer: Peer | None
    """Its connection; None while that is lost."""
    ranks: range
    first_incarnations: dict[int, int]
    """Engine -> what its incarnation 0 on this node is called here."""
    last_heard: float
    lost_at: float = 0.0
    """When the connection was lost."""
    ups: dict[int, int] = field(default_factory=dict)
    """Engines that are up -> incarnation, as it is called here."""


class NodeRegistry:
    """Listens for nodes on a thread of its own, until `close`.

    `ranks` are the engines that nodes may have, of `size` in all, and `settings` those that a node must share.
    `publish` is called on that thread. A node whose connection is lost may make another: its engines are then the same
    as before. The incarnation numbers of a node that was declared gone and comes back continue from the previous ones,
    so that stale events are not mistaken for new ones. A node that comes for engines that another has must wait until
    that one is known to be gone. Raises ConfigError when the address cannot be bound.
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
        self._ranks = ranks
        self._size = size
        self._settings = settings
        self._publish = publish
        self._timeout_s = timeout_s
        self._clock = AwakeClock(MAX_GAP_S)
        self._socket = ServerSocket(address, secret, accepts=(Role.NODE,), limits=LIMITS)
        self.address = self._socket.address
        self._incoming: Codec[NodeMessage] = Codec(NodeMessage)
        self._outgoing: Codec[HeadMessage] = Codec(HeadMessage)
        self._socket.watch(joined=lambda peer: None, lost=self._on_connection_lost)
        self._nodes: dict[str, _Node] = {}
        """By the id that they drew."""
        self._waiting: set[str] = set()
        """Ids of nodes that wait for engines of another, for the log."""
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
                self._on_message(*received)
            if time.monotonic() >= next_pulse:
                next_pulse = time.monotonic() + PULSE_S
                self._check_nodes()
        for node in self._nodes.values():
            self._send(node, HeadGoodbye())

    def _on_message(self, peer: Peer, frames: list[Frame]) -> None:
        try:
            message = self._incoming.decode(frames)
        except TransportError as error:
            logger.warning("dropped a message of %s: %s", peer, error)
            return
        node = next((node for node in self._nodes.values() if node.peer == peer), None)
        if isinstance(message, NodeHello):
            self._answer(peer, message)
        elif node is None:
            logger.debug("dropped a message of %s, which is not registered", peer)
        elif isinstance(message, NodeGoodbye):
            self._lose(node, message.reason)
        else:
            node.last_heard = self._clock.now()
            if not isinstance(message, NodePulse):
                self._forward(node, message)

    def _answer(self, peer: Peer, hello: NodeHello) -> None:
        ranks = range(hello.first_rank, hello.first_rank + hello.num_ranks)
        problem = self._reason_to_refuse(hello, ranks)
        if problem is not None:
            logger.error("refused the node %s: %s", hello.name, problem)
            self._tell(peer, NodeRefused(problem))
            self._socket.forget(peer)
            return
        owner = self._other_owner(hello, ranks)
        if owner is not None:
            reason = f"engines {name_ranks(owner.ranks)} run on the node {owner.hello.name} already"
            self._log_wait(hello, reason)
            self._tell(peer, NodeMustWait(reason))
            self._socket.forget(peer)
            return
        self._waiting.discard(hello.node_id)
        self._register(peer, hello, ranks)

    def _register(self, peer: Peer, hello: NodeHello, ranks: range) -> None:
        node = self._nodes.get(hello.node_id)
        if node is not None and node.ranks == ranks:
            logger.info("the node %s is connected again", hello.name)
            node.peer = peer
            node.last_heard = self._clock.now()
        else:
            first = {rank: self._next_incarnations[rank] for rank in ranks}
            node = self._nodes[hello.node_id] = _Node(hello, peer, ranks, first, self._clock.now())
            logger.info("the node %s has engines %s", hello.name, name_ranks(ranks))
        self._send(node, NodeWelcome())

    def _reason_to_refuse(self, hello: NodeHello, ranks: range) -> str | None:
        """Why a node does not belong to this server; None: it does."""
        for name in sorted({*self._settings, *hello.settings}):
            there = hello.settings.get(name)
            here = self._settings.get(name)
            if there != here:
                return f"{name} is {there} on the node and {here} on the head"
        if hello.size != self._size:
            return f"data_parallel_size is {hello.size} on the node and {self._size} on the head"
        if not ranks or ranks[0] not in self._ranks or ranks[-1] not in self._ranks:
            return (
                f"engines {name_ranks(ranks)} are not those of nodes, which are {name_ranks(self._ranks)}: "
                "check --data-parallel-start-rank and --data-parallel-size-local on both"
            )
        return None

    def _other_owner(self, hello: NodeHello, ranks: range) -> _Node | None:
        """Another node that has some of these engines and may be alive. One whose connection is lost is replaced."""
        for node in list(self._nodes.values()):
            if set(ranks) & set(node.ranks) and node.hello.node_id != hello.node_id:
                if self._send(node, HeadPulse()):
                    return node
                self._lose(node, f"the node {hello.name} has come in its place")
        return None

    def _log_wait(self, hello: NodeHello, reason: str) -> None:
        """Once per node, which asks every second."""
        if hello.node_id not in self._waiting and len(self._waiting) < MAX_REMEMBERED_WAITS:
            self._waiting.add(hello.node_id)
            logger.warning("the node %s has to wait: %s", hello.name, reason)

    def _forward(self, node: _Node, event: FleetEvent) -> None:
        """Publish an event as if the engine were here. One that a node gave up may come back with another node."""
        if event.index not in node.ranks:
            logger.warning("dropped an event of engine %d, which is not the node %s's", event.index, node.hello.name)
            return
        if isinstance(event, EngineLoadReport):
            self._publish(event)
            return
        incarnation = node.first_incarnations[event.index] + event.incarnation
        self._next_incarnations[event.index] = max(self._next_incarnations[event.index], incarnation + 1)
        match event:
            case EngineUp():
                if node.ups.get(event.index) == incarnation:
                    return  # said again, over another connection
                node.ups[event.index] = incarnation
                self._publish(msgspec.structs.replace(event, incarnation=incarnation))
            case EngineDown():
                node.ups.pop(event.index, None)
                self._publish(msgspec.structs.replace(event, incarnation=incarnation, final=False))
            case EngineStalled():
                self._publish(msgspec.structs.replace(event, incarnation=incarnation))

    def _check_nodes(self) -> None:
        for node in list(self._nodes.values()):
            now = self._clock.now()
            if now - node.last_heard > self._timeout_s:
                self._lose(node, f"it was silent for {self._timeout_s:g} s")
            elif node.peer is None and now - node.lost_at > RETURN_S:
                self._lose(node, "it did not connect again")
            else:
                self._send(node, HeadPulse())

    def _on_connection_lost(self, peer: Peer, why: str) -> None:
        """A connection is lost, which may be all: the node gets a moment to make another."""
        for node in self._nodes.values():
            if node.peer == peer:
                logger.warning("the connection to the node %s is lost: %s", node.hello.name, why)
                node.peer = None
                node.lost_at = self._clock.now()

    def _lose(self, node: _Node, reason: str) -> None:
        """A node is gone, and its engines with it."""
        del self._nodes[node.hello.node_id]
        if node.peer is not None:
            self._socket.forget(node.peer)
        logger.error("the node %s with engines %s is gone: %s", node.hello.name, name_ranks(node.ranks), reason)
        for rank, incarnation in node.ups.items():
            why = f"its node {node.hello.name} is gone: {reason}"
            self._publish(EngineDown(rank, incarnation, why, awaits_node=True))

    def _send(self, node: _Node, message: HeadMessage) -> bool:
        """Send to a node; whether there is a connection to send over."""
        return node.peer is not None and self._tell(node.peer, message)

    def _tell(self, peer: Peer, message: HeadMessage) -> bool:
        with contextlib.suppress(PeerGoneError):  # `_on_connection_lost` is called for it
            self._socket.send(peer, self._outgoing.encode(message))
            return True
        return False


def name_ranks(ranks: range) -> str:
    """For people: 2 to 3."""
    return f"{ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else ", ".join(map(str, ranks)) or "(none)"
