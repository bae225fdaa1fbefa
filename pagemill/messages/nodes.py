"""Messages between the head of a server and a node, a machine that runs engines only."""

import msgspec

from pagemill.messages.fleet import FleetEvent


class NodeHello(msgspec.Struct, frozen=True, tag="node_hello"):
    """The first message of a node over a connection."""

    node_id: str
    """Drawn at random by the node's process, which may connect more than once."""
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
    """A sign of life of the node."""


class NodeGoodbye(msgspec.Struct, frozen=True, tag="node_goodbye"):
    """The node ends, and its engines with it."""

    reason: str


NodeMessage = NodeHello | NodePulse | NodeGoodbye | FleetEvent
"""Node to head. Incarnations are counted by the node's process."""


class NodeWelcome(msgspec.Struct, frozen=True, tag="node_welcome"):
    """The node belongs to the server."""


class NodeRefused(msgspec.Struct, frozen=True, tag="node_refused"):
    """The node does not belong to the server, and ends."""

    reason: str


class NodeMustWait(msgspec.Struct, frozen=True, tag="node_must_wait"):
    """The node's engines are those of another node, which may be gone without the head's knowledge: try again, until
    that one has either shown a sign of life or been silent for too long."""

    reason: str


class HeadPulse(msgspec.Struct, frozen=True, tag="head_pulse"):
    """A sign of life of the head."""


class HeadGoodbye(msgspec.Struct, frozen=True, tag="head_goodbye"):
    """The server ends."""


HeadMessage = NodeWelcome | NodeRefused | NodeMustWait | HeadPulse | HeadGoodbye
"""Head to node."""
