"""What the head of a server and a node, a machine that has engines only, say to each other."""

import msgspec

from pagemill.messages.fleet import FleetEvent


class NodeHello(msgspec.Struct, frozen=True, tag="node_hello"):
    """The first word of a node."""

    node_id: str
    """Drawn at random by the node's process: it may connect twice."""
    name: str
    """For people: the machine and the process."""
    size: int
    """Engines of the whole server, as the node was told."""
    first_rank: int
    num_ranks: int
    """Its engines: those from `first_rank` on."""
    settings: dict[str, str]
    """What must be the same on all machines, by name."""


class NodePulse(msgspec.Struct, frozen=True, tag="node_pulse"):
    """The node is there."""


class NodeGoodbye(msgspec.Struct, frozen=True, tag="node_goodbye"):
    """The node ends, and its engines with it."""

    reason: str


NodeMessage = NodeHello | NodePulse | NodeGoodbye | FleetEvent
"""Node to head. Incarnations are counted by the node's process."""


class NodeWelcome(msgspec.Struct, frozen=True, tag="node_welcome"):
    """The node belongs to the server."""


class NodeRefused(msgspec.Struct, frozen=True, tag="node_refused"):
    """It does not."""

    reason: str


class HeadPulse(msgspec.Struct, frozen=True, tag="head_pulse"):
    """The head is there."""


class HeadGoodbye(msgspec.Struct, frozen=True, tag="head_goodbye"):
    """The server ends."""


HeadMessage = NodeWelcome | NodeRefused | HeadPulse | HeadGoodbye
"""Head to node."""
