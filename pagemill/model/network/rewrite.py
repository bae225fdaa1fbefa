"""Fusions: rewrites of a list of operations, found by pattern. Which kernels do together what is found here is for
program.py (torch, Triton) and native_plan.py (C++) to say.

Knows operations; no model, no device.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pagemill.model.attention.layer import Attention
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.mla import AbsorbedLinear
from pagemill.model.layers.norm import LayerNorm, RMSNorm
from pagemill.model.layers.rotary import Rotary
from pagemill.model.network.operations import (
    Absorb,
    Activate,
    Add,
    Attend,
    Expand,
    Gate,
    Join,
    Multiply,
    Network,
    Norm,
    Operation,
    PerHead,
    Rotate,
    Select,
    Split,
    SplitHeads,
    Value,
)

Found = TypeVar("Found", bound=Operation)


@dataclass(eq=False)
class AddNorm(Operation):
    """(x, residual) -> (norm(x + residual), x + residual). The sum may take the residual's place."""

    layer: RMSNorm | LayerNorm


@dataclass(eq=False)
class MultiplyActivate(Multiply):
    """A linear layer, and the activation of its results."""

    activation: str = ""


@dataclass(eq=False)
class HeadsAttend(Operation):
    """(qkv[, cos, sin]) -> [T, H * D]: norms of query and key where there are such, rotary embedding, attention."""

    layer: Attention
    heads: SplitHeads
    rotary: Rotary | None
    """None where nothing is turned."""
    norms: tuple[RMSNorm | LayerNorm, ...]
    """Of query and key, or none. They are RMS norms."""


@dataclass(eq=False)
class LatentAttend(Operation):
    """(queries [T, H * (rotary + plain)], kept [T, rotary + latent], cos, sin) -> [T, H * value]: the norm of what is
    latent, rotary embedding, attention, by queries in the latent space or keys and values out of it. Both inputs may be
    written over."""

    layer: Attention
    absorbed: AbsorbedLinear
    rotary: Rotary
    norm: RMSNorm | LayerNorm
    """An RMS norm."""


@dataclass(eq=False)
class AttendSelected(Operation):
    """(the inputs of `attend`, rows) -> [L, H * D]: attention of which only the rows that are asked for are read; of
    all rows where none are."""

    attend: HeadsAttend | LatentAttend


@dataclass(eq=False)
class NormChain(Operation):
    """A norm with what is before and after it: (x[, residual]) -> (result[, x + residual]), with x multiplied by
    `before` first, and the norm multiplied by `after` at last, where there are such. An RMS norm."""

    layer: RMSNorm | LayerNorm
    before: Multiply | None
    after: Multiply | None


@dataclass(eq=False)
class ChainPair(Operation):
    """(x, residual) -> (result, the last sum): two norms with the linear layers before and after them, of which the
    second reads all that the first gives, and nothing else does."""

    first: NormChain
    second: NormChain


class Graph:
    """Who makes and who reads each value of a list of operations, and who is the last to."""

    def __init__(self, operations: Iterable[Operation], result: Value, kept: tuple[Value, ...] = ()) -> None:
        """`kept`: values that are needed beside the result, and that no operation reads."""
        self.operations = list(operations)
        self.result = result
        self.kept = kept
        self.maker = {value: op for op in self.operations for value in op.outputs}
        self.place = {op: index for index, op in enumerate(self.operations)}
        self.readers: dict[Value, list[Operation]] = {}
        """In their order, each once."""
        for op in self.operations:
            for value in dict.fromkeys(op.inputs):
                self.readers.setdefault(value, []).append(op)
        self.last = {value: op for op in self.operations for value in (*op.outputs, *op.inputs)}
        """The operation after which a value is not needed any more: its last reader, or its maker where nothing reads
        it. What is needed in the end is not here."""
        for value in (result, *kept):
            self.last.pop(value, None)

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

    def chain(self, value: Value, *kinds: type[Operation]) -> list[Any]:
        """The operations that make a value one after the other, the last one first, each of its kind and for nothing
        but the one after it, whose first input it gives. Empty where they are others."""
        found: list[Any] = []
        for kind in kinds:
            op = self.made_for_one(kind, value)
            if op is None:
                return []
            found.append(op)
            value = op.inputs[0]
        return found

    def follows(self, first: Operation, second: Operation) -> bool:
        """Whether an operation comes right after another, but for selected rows."""
        between = self.operations[self.place[first] + 1 : self.place[second]]
        return all(isinstance(op, Select) for op in between)

    def ends_at(self, op: Operation) -> list[Value]:
        """The values that are not needed any more after an operation."""
        return [value for value in dict.fromkeys((*op.inputs, *op.outputs)) if self.last.get(value) is op]

    def may_overwrite(self, value: Value, reader: Operation) -> bool:
        """Whether nothing reads the memory of a value once `reader` has."""
        if self.last.get(value) is not reader or any(before.views for before in self.readers[value][:-1]):
            return False
        op = self.maker.get(value)
        if isinstance(op, Select):  # all rows may be asked for: then it is its input
            return self.may_overwrite(op.inputs[0], op)
        return op is None or op.owns


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
    return Graph(operations, select(graph.result), graph.kept)


def fuse_attention(graph: Graph) -> Graph:
    """What is between the projection of query, key and value and attention."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        if not isinstance(op, Attend) or len(op.inputs) == 1:
            continue
        found = _attention_inputs(graph, op) or _latent_inputs(graph, op)
        if found is not None:
            fused[op], parts = found
            gone |= parts
    return _replaced(graph, fused, gone)


def _attention_inputs(graph: Graph, attend: Attend) -> tuple[Operation, set[Operation]] | None:
    query, key, value = attend.inputs
    heads = graph.made_for_one(SplitHeads, value)
    turns = [turn for turn in (graph.made_for_one(Rotate, part) for part in (query, key)) if turn]
    tables = {turn.inputs[1:] for turn in turns} or {()}
    if heads is None or len(turns) == 1 or len(tables) > 1:
        return None
    ends = [turn.inputs[0] for turn in turns] or [query, key]
    norms = [norm for norm in (graph.made_for_one(Norm, end) for end in ends) if norm and not norm.layer.centers]
    plain = (*([norm.inputs[0] for norm in norms] or ends), value)
    if plain != heads.outputs or graph.only_reader(heads.inputs[0]) is not heads:
        return None
    if any(graph.only_reader(part) is None for part in plain):
        return None
    inputs = (heads.inputs[0], *tables.pop())
    rotary = turns[0].rotary if turns else None
    found = HeadsAttend(inputs, attend.outputs, attend.layer, heads, rotary, tuple(norm.layer for norm in norms))
    return found, {heads, *turns, *norms}


def fuse_selection(graph: Graph) -> Graph:
    """Attention with the selection of rows after it, of the last layer."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        if not isinstance(op, Select):
            continue
        attend = graph.made_for_one(HeadsAttend, op.inputs[0]) or graph.made_for_one(LatentAttend, op.inputs[0])
        if attend is not None and graph.follows(attend, op):
            fused[op] = AttendSelected((*attend.inputs, *op.inputs[1:]), op.outputs, attend)
            gone.add(attend)
    return _replaced(graph, fused, gone)


def _latent_inputs(graph: Graph, attend: Attend) -> tuple[Operation, set[Operation]] | None:
    query, key, value = attend.inputs
    queries = graph.chain(query, Absorb, Rotate, PerHead)
    kept = graph.chain(key, Rotate, PerHead, Join)
    if key is not value or not queries or not kept or queries[1].inputs[1:] != kept[0].inputs[1:]:
        return None
    expand = graph.only_reader(attend.outputs[0])
    if not isinstance(expand, Expand) or expand.layer is not queries[0].layer:
        return None
    turned, latent = kept[2].inputs
    normed = graph.chain(latent, Norm, Split)
    if (
        not normed
        or normed[0].layer.centers
        or (turned, normed[0].inputs[0]) != normed[1].outputs
        or graph.only_reader(turned) is None
    ):
        return None
    heads = queries[2]
    split = normed[1]
    if not all(graph.may_overwrite(op.inputs[0], op) for op in (heads, split)):
        return None
    inputs = (heads.inputs[0], split.inputs[0], *kept[0].inputs[1:])
    found = LatentAttend(inputs, expand.outputs, attend.layer, queries[0].layer, queries[1].rotary, normed[0].layer)
    return found, {*queries, *kept, *normed, expand}


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


def fuse_activations(graph: Graph) -> Graph:
    """A linear layer with the plain activation after it."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        before = graph.made_for_one(Multiply, op.inputs[0]) if isinstance(op, Activate) else None
        if before is not None and isinstance(op, Activate):
            fused[op] = MultiplyActivate(before.inputs, op.outputs, before.layer, before.gate, op.activation)
            gone.add(before)
    return _replaced(graph, fused, gone)


def fuse_norms(graph: Graph) -> Graph:
    """RMS norms with the linear layers before and after them."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        if not isinstance(op, Norm | AddNorm) or op.layer.centers:
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


def fuse_chains(graph: Graph) -> Graph:
    """Norms with linear layers before and after them, two by two: what is between the attentions of two layers."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        if not isinstance(op, NormChain) or not _is_whole(op):
            continue
        first = graph.made_for_one(NormChain, op.inputs[0])
        if first is None or not _is_whole(first) or first.outputs != op.inputs or not graph.follows(first, op):
            continue
        if first not in fused and graph.only_reader(first.outputs[1]) is op:
            fused[op] = ChainPair(first.inputs, op.outputs, first, op)
            gone.add(first)
    return _replaced(graph, fused, gone)


def _is_whole(chain: NormChain) -> bool:
    """Whether it has a linear layer before and after, and a residual."""
    return chain.before is not None and chain.after is not None and len(chain.inputs) == len(chain.outputs) == 2


def _replaced(graph: Graph, fused: dict[Operation, Operation], gone: set[Operation]) -> Graph:
    operations = (fused.get(op, op) for op in graph.operations if op not in gone)
    return Graph(operations, graph.result, graph.kept)
