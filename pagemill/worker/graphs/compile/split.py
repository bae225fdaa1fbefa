"""`split`: a traced model, cut at operations. Knows torch.fx; nothing about what the operations do."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module


@dataclass(frozen=True)
class Piece:
    """A child of the split module."""

    name: str
    graph: GraphModule
    cut: bool
    """Whether it is a splitting operation, not what lies between two."""


@dataclass(frozen=True)
class SplitGraph:
    """A module that calls its pieces in order, and the pieces."""

    module: GraphModule
    pieces: tuple[Piece, ...]

    def replace(self, piece: Piece, callable_: nn.Module) -> None:
        """Call this in place of the piece."""
        setattr(self.module, piece.name, callable_)


def split(graph: GraphModule, ops: Collection[str]) -> SplitGraph:
    """Cut at every call of one of `ops`, written namespace::name. With none, there is one piece."""
    piece_of: dict[Node, int] = {}
    cuts = set()
    current = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if op_name(node) in ops:
            piece_of[node] = current + 1
            cuts.add(current + 1)
            current += 2
        else:
            piece_of[node] = current
    # split_module's annotation knows no node arguments; the parent module is not used.
    module = split_module(graph, None, lambda node: piece_of[node], keep_original_order=True)  # type: ignore[arg-type]
    pieces = [
        Piece(name, child, int(name.rpartition("_")[2]) in cuts)
        for name, child in module.named_children()
        if isinstance(child, GraphModule)
    ]
    return SplitGraph(module, tuple(pieces))


def op_name(node: Node) -> str:
    """namespace::name of a call; empty for what is no call of an operation."""
    if node.op != "call_function":
        return ""
    target = node.target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "_qualified_op_name", ""))
