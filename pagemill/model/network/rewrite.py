"""Fusions: rewrites of a list of operations, found by pattern. Which kernels do together what is found here is for
program.py (torch, Triton) and native_plan.py (C++) to say.

Knows operations; no model, no device.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from pagemill.model.attention.layer import Attention
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.rotary import Rotary
from pagemill.model.network.operations import (
    Add,
    AllReduce,
    Attend,
    Call,
    Embed,
    Gate,
    Multiply,
    Network,
    Norm,
    Operation,
    Rotate,
    Select,
    SplitHeads,
    Value,
)

Found = TypeVar("Found", bound=Operation)

_FRESH = (Add, AllReduce, Embed, Gate, Multiply, Norm)
"""Operations whose result is a tensor of its own."""
_LOOKS_INTO = (Call, Select, SplitHeads)
"""Operations whose result may lie in the memory of their input."""


@dataclass(eq=False)
class AddNorm(Operation):
    """(x, residual) -> (norm(x + residual), x + residual). The sum may take the residual's place."""

    layer: RMSNorm


@dataclass(eq=False)
class HeadsAttend(Operation):
    """(qkv, cos, sin) -> [T, H * D]: norms of query and key where there are such, rotary embedding, attention."""

    layer: Attention
    heads: SplitHeads
    rotary: Rotary
    norms: tuple[RMSNorm, ...]
    """Of query and key, or none."""


@dataclass(eq=False)
class NormChain(Operation):
    """A norm with what is before and after it: (x[, residual]) -> (result[, x + residual]), with x multiplied by
    `before` first, and the norm multiplied by `after` at last, where there are such."""

    layer: RMSNorm
    before: Multiply | None
    after: Multiply | None


class Graph:
    """Who makes and who reads each value of a list of operations."""

    def __init__(self, operations: Iterable[Operation], result: Value) -> None:
        self.operations = list(operations)
        self.result = result
        self.maker = {value: op for op in self.operations for value in op.outputs}
        self.place = {op: index for index, op in enumerate(self.operations)}
        self.readers: dict[Value, list[Operation]] = {}
        for op in self.operations:
            for value in op.inputs:
                self.readers.setdefault(value, []).append(op)

    def made_by(self, kind: type[Found], value: Value) -> Found | None:
        """The operation of this kind that makes a value."""
        op = self.maker.get(value)
        return op if isinstance(op, kind) else None

    def only_reader(self, value: Value) -> Operation | None:
        """The one operation that reads a value; None where it is the result, or several do."""
        readers = self.readers.get(value, ())
        return readers[0] if len(readers) == 1 and value is not self.result else None

    def made_for_one(self, kind: type[Found], value: Value) -> Found | None:
        """The operation of this kind that makes a value for one reader."""
        return self.made_by(kind, value) if self.only_reader(value) is not None else None

    def follows(self, first: Operation, second: Operation) -> bool:
        """Whether an operation comes right after another, but for selected rows."""
        between = self.operations[self.place[first] + 1 : self.place[second]]
        return all(isinstance(op, Select) for op in between)

    def may_overwrite(self, value: Value, reader: Operation) -> bool:
        """Whether nothing reads the memory of a value once `reader` has."""
        op, readers = self.maker.get(value), self.readers[value]
        if value is self.result or readers[-1] is not reader:
            return False
        if any(isinstance(before, _LOOKS_INTO) for before in readers[:-1]):
            return False
        if isinstance(op, Select):  # all rows may be asked for: then it is its input
            return self.readers[op.inputs[0]][-1] is op and self.may_overwrite(op.inputs[0], op)
        return op is None or isinstance(op, _FRESH)


def include_gates(network: Network) -> None:
    """Tell linear layers between which there is a gate that the first may include it, where its weight can. Before
    weights are loaded."""
    graph = Graph(network.operations, network.result)
    gates: dict[Linear, set[str | None]] = {}
    for op in network.operations:
        if isinstance(op, Multiply):
            gate = graph.only_reader(op.outputs[0])
            between = isinstance(gate, Gate) and isinstance(graph.only_reader(gate.outputs[0]), Multiply)
            activation = gate.activation if isinstance(gate, Gate) and between else None
            gates.setdefault(op.layer, set()).add(activation)
    for layer, found in gates.items():
        if len(found) == 1:  # of a layer that is used in different ways, nothing is included
            layer.gate = found.pop()


def fuse_gates(graph: Graph) -> Graph:
    """A linear layer with the gate before it, whether or not the layer before that includes it."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        gate = graph.made_for_one(Gate, op.inputs[0]) if isinstance(op, Multiply) else None
        if gate is not None and isinstance(op, Multiply):
            fused[op] = Multiply(gate.inputs, op.outputs, op.layer, gate.activation)
            gone.add(gate)
    return _replaced(graph, fused, gone)


def select_rows(graph: Graph) -> Graph:
    """The rows that are asked for of the result, selected as early as they can be: nothing is computed of the others
    from where rows no longer depend on each other."""
    apart: set[Operation] = set()
    for op in reversed(graph.operations):
        readers = [reader for value in op.outputs for reader in graph.readers.get(value, ())]
        needed = bool(readers) or graph.result in op.outputs
        if op.row_wise and needed and all(reader in apart for reader in readers):
            apart.add(op)
    selected: dict[Value, Value] = {}
    operations: list[Operation] = []

    def select(value: Value) -> Value:
        if graph.maker.get(value) in apart:
            return value
        if value not in selected:
            selected[value] = Value(value.network)
            operations.append(Select((value, value.network.rows), (selected[value],)))
        return selected[value]

    for op in graph.operations:
        if op in apart:
            op = dataclasses.replace(op, inputs=tuple(select(value) for value in op.inputs))
        operations.append(op)
    return Graph(operations, select(graph.result))


def fuse_attention(graph: Graph) -> Graph:
    """What is between the projection of query, key and value and attention."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        found = _attention_inputs(graph, op) if isinstance(op, Attend) else None
        if found is not None:
            fused[op], parts = found
            gone |= parts
    return _replaced(graph, fused, gone)


def _attention_inputs(graph: Graph, attend: Attend) -> tuple[HeadsAttend, set[Operation]] | None:
    query, key, value = attend.inputs
    heads = graph.made_for_one(SplitHeads, value)
    turns = [graph.made_for_one(Rotate, part) for part in (query, key)]
    first, second = turns
    if heads is None or first is None or second is None or first.inputs[1:] != second.inputs[1:]:
        return None
    norms = [norm for norm in (graph.made_for_one(Norm, turn.inputs[0]) for turn in (first, second)) if norm]
    parts = norms or (first, second)
    plain = (*(part.inputs[0] for part in parts), value)
    if plain != heads.outputs or graph.only_reader(heads.inputs[0]) is not heads:
        return None
    if any(graph.only_reader(part) is None for part in plain):
        return None
    inputs = (heads.inputs[0], *first.inputs[1:])
    found = HeadsAttend(inputs, attend.outputs, attend.layer, heads, first.rotary, tuple(norm.layer for norm in norms))
    return found, {heads, first, second, *norms}


def fuse_sums(graph: Graph) -> Graph:
    """A norm with the sum before it, where the sum may be kept in the place of one of its parts."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        add = graph.made_by(Add, op.inputs[0]) if isinstance(op, Norm) else None
        if add is None or not isinstance(op, Norm) or not graph.follows(add, op):
            continue
        for residual, x in (add.inputs, add.inputs[::-1]):
            if residual is not x and graph.may_overwrite(residual, add):
                fused[op] = AddNorm((x, residual), (*op.outputs, *add.outputs), op.layer)
                gone.add(add)
                break
    return _replaced(graph, fused, gone)


def fuse_norms(graph: Graph) -> Graph:
    """Norms with the linear layers before and after them."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        if not isinstance(op, Norm | AddNorm):
            continue
        after = graph.only_reader(op.outputs[0])
        last = after if isinstance(after, Multiply) else None
        before = graph.made_for_one(Multiply, op.inputs[0])
        if before in gone or (before is not None and not graph.follows(before, op)):
            before = None  # as it is the one after another norm, or what is between may write to its input
        if last is None and before is None:
            continue
        inputs = (op.inputs if before is None else before.inputs) + op.inputs[1:] * (before is not None)
        outputs = (op.outputs if last is None else last.outputs) + op.outputs[1:] * (last is not None)
        fused[op] = NormChain(inputs, outputs, op.layer, before, last)
        gone |= {part for part in (before, last) if part is not None}
    return _replaced(graph, fused, gone)


def _replaced(graph: Graph, fused: dict[Operation, Operation], gone: set[Operation]) -> Graph:
    operations = (fused.get(op, op) for op in graph.operations if op not in gone)
    return Graph(operations, graph.result)
