"""What is between a projection and attention where the usual fusion does not fit: norms of values, LayerNorms, norms
over all heads or with weights for each, norms behind rotary embedding, queries that grow, keys that are values too, and
layers that read the keys and values of another. For native plans.

Knows operations; no model.
"""

from dataclasses import dataclass
from typing import TypeAlias

from pagemill.model.attention.layer import Attention
from pagemill.model.layers.head_norms import LayerNormOfEachHead, RMSNormOfAllHeads
from pagemill.model.layers.norm import LayerNorm, RMSNorm
from pagemill.model.layers.query_growth import QueryGrowth
from pagemill.model.layers.rotary import Rotary
from pagemill.model.network.operations import Attend, Call, Norm, Operation, PerHead, Rotate, Split, SplitHeads, Value
from pagemill.model.network.rewrite import Graph

HeadNorm: TypeAlias = RMSNorm | LayerNorm | RMSNormOfAllHeads | LayerNormOfEachHead


@dataclass(eq=False)
class ProjectedAttend(Operation):
    """(projected[, cos, sin]) -> [T, H * D]: norms, rotary embedding of query and key, growth of queries, attention."""

    layer: Attention
    rotary: Rotary | None
    """None where nothing is turned."""
    norms: tuple[HeadNorm | None, HeadNorm | None, HeadNorm | None]
    """Of query, key and value."""
    key_is_value: bool = False
    """Whether what is projected are queries and keys, and values are keys before their norm."""
    norms_last: bool = False
    """Whether norms of query and key come after rotary embedding."""
    growth: QueryGrowth | None = None
    """Of queries, at last."""


class _Part:
    """Queries, keys or values: the plain ones, and what is done to them."""

    def __init__(self, graph: Graph, value: Value) -> None:
        grown = graph.made_for_one(Call, value)
        self.grown = grown if grown is not None and isinstance(grown.function, QueryGrowth) else None
        value = _before(self.grown, value)
        self.turn = graph.made_for_one(Rotate, value)
        value = _before(self.turn, value)
        self.norm = graph.made_for_one(Norm, value) or graph.made_for_one(Call, value)
        self.layer = _layer_of(self.norm)
        if self.layer is None:
            self.norm = None
        value = _before(self.norm, value)
        below = graph.made_for_one(Rotate, value) if self.turn is None and self.norm is not None else None
        self.norm_is_last = below is not None
        self.turn = self.turn or below
        self.plain = _before(below, value)

    @property
    def operations(self) -> set[Operation]:
        """What is done to them."""
        return {op for op in (self.turn, self.norm, self.grown) if op is not None}

    @property
    def growth(self) -> QueryGrowth | None:
        """What queries are multiplied by at their positions, if anything."""
        function = None if self.grown is None else self.grown.function
        return function if isinstance(function, QueryGrowth) else None

    @property
    def tables(self) -> tuple[Value, ...]:
        """cos and sin, where they are turned."""
        return () if self.turn is None else self.turn.inputs[1:]


def _before(op: Operation | None, value: Value) -> Value:
    """What an operation reads first; without one, what there is."""
    return value if op is None else op.inputs[0]


def _layer_of(norm: Norm | Call | None) -> HeadNorm | None:
    """None of what is another norm, or none."""
    layer = norm.function if isinstance(norm, Call) else None if norm is None else norm.layer
    return layer if isinstance(layer, HeadNorm) else None


def fuse_projected_attention(graph: Graph) -> Graph:
    """A graph whose attention, as far as it is not fused yet, is with what comes before it."""
    fused: dict[Operation, Operation] = {}
    gone: set[Operation] = set()
    for op in graph.operations:
        found = _found(graph, op) if isinstance(op, Attend) else None
        if found is not None:
            fused[op], parts = found
            gone |= parts
    operations = (fused.get(op, op) for op in graph.operations if op not in gone)
    return Graph(operations, graph.result, graph.kept)


def _found(graph: Graph, attend: Attend) -> tuple[Operation, set[Operation]] | None:
    parts = [_Part(graph, value) for value in attend.inputs]
    query = parts[0]
    if len(parts) == 1:
        source = _of_queries(graph, query)
    else:
        key, value = parts[1:]
        if value.turn is not None or key.tables != query.tables or key.growth is not None or value.growth is not None:
            return None
        source = _of_all(graph, query, key, value) or _of_two(graph, query, key, value)
    normed = {part.norm_is_last for part in parts[:2] if part.norm is not None and part.turn is not None}
    if source is None or len(normed) > 1:
        return None
    projected, before, key_is_value = source
    first, second, third = (*(part.layer for part in parts), None, None)[:3]
    rotary = None if query.turn is None else query.turn.rotary
    inputs = (projected, *query.tables)
    found = ProjectedAttend(
        inputs, attend.outputs, attend.layer, rotary, (first, second, third), key_is_value, True in normed, query.growth
    )
    return found, before.union(*(part.operations for part in parts))


_Source = tuple[Value, set[Operation], bool]
"""What is projected, the operations that take it apart, and whether keys are values."""


def _of_queries(graph: Graph, query: _Part) -> _Source | None:
    heads = graph.made_for_one(PerHead, query.plain)
    if heads is None or graph.only_reader(heads.inputs[0]) is not heads:
        return None
    return heads.inputs[0], {heads}, False


def _of_all(graph: Graph, query: _Part, key: _Part, value: _Part) -> _Source | None:
    heads = graph.made_for_one(SplitHeads, value.plain)
    plain = (query.plain, key.plain, value.plain)
    if heads is None or plain != heads.outputs or graph.only_reader(heads.inputs[0]) is not heads:
        return None
    return None if any(graph.only_reader(part) is None for part in plain) else (heads.inputs[0], {heads}, False)


def _of_two(graph: Graph, query: _Part, key: _Part, value: _Part) -> _Source | None:
    queries = graph.made_for_one(PerHead, query.plain)
    keys = graph.made_by(PerHead, key.plain)
    split = None if keys is None else graph.made_for_one(Split, keys.inputs[0])
    if key.plain is not value.plain or queries is None or keys is None or split is None:
        return None
    readers = {op for part in (key, value) for op in part.operations}
    if not set(graph.readers[key.plain]) <= readers or (queries.inputs[0], keys.inputs[0]) != split.outputs:
        return None
    if graph.only_reader(queries.inputs[0]) is None or graph.only_reader(split.inputs[0]) is not split:
        return None
    return split.inputs[0], {queries, keys, split}, True
