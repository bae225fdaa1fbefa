"""`make_plan`: a network as a plan that native code runs on a CPU, where every operation has a native form.

Knows operations and what native code asks of a plan's buffers; nothing about models.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.layer_plan import (
    PLAN_GATES,
    LayerPlan,
    LookUp,
    PlanBuilder,
    StepTokens,
    TokenTable,
)
from pagemill.model.kernels.linear import PackedLinear, with_activation
from pagemill.model.kernels.native import library
from pagemill.model.kernels.plan_parts import AttentionParts, LatentParts, NormWeight
from pagemill.model.kernels.streams import StreamFunction
from pagemill.model.layers.embedding import Embedding, EmbeddingSum, FirstTokens
from pagemill.model.layers.head_norms import RMSNormOfAllHeads
from pagemill.model.network.operations import (
    Add,
    AnyGate,
    ApplyExperts,
    Call,
    Embed,
    EmbedPositions,
    Embeds,
    Head,
    Join,
    Keep,
    Multiply,
    Network,
    Norm,
    Operation,
    PerHead,
    Product,
    RotaryTable,
    Route,
    Scale,
    ScaleLearnt,
    SoftCap,
    Split,
    Value,
)
from pagemill.model.network.projected_attention import HeadNorm, ProjectedAttend, fuse_projected_attention
from pagemill.model.network.rewrite import (
    AddNorm,
    Graph,
    HeadsAttend,
    LatentAttend,
    MultiplyActivate,
    fuse_activations,
    fuse_attention,
    fuse_gates,
    fuse_sums,
)
from pagemill.model.quantization.panels import GATES

WHOLE_ONLY = "only whole models run as a plan, from the embedding to the last norm"
_ATTENDS = HeadsAttend, ProjectedAttend, LatentAttend


class NotPlannable(Exception):
    """Some part of a network has no native form; the message says which."""


def make_plan(network: Network, logits: Network | None, dtype: torch.dtype) -> LayerPlan:
    """The plan of a network, of weights that are loaded and caches that are there; to the logits, where they are what
    an output head gives: others are not for native code to choose tokens from.

    Raises NotPlannable."""
    if dtype != torch.bfloat16 or library() is None:
        raise NotPlannable("only models in bfloat16, with native kernels, run as a plan")
    # What is kept is no copy here: nothing else is written to its buffer.
    kept = {op.outputs[0]: op.inputs[0] for op in network.operations if isinstance(op, Keep)}
    graph = Graph((op for op in network.operations if not isinstance(op, Keep)), network.result)
    for fuse in (fuse_gates, fuse_activations, fuse_attention, fuse_projected_attention, fuse_sums):
        graph = fuse(graph)
    graph = _with_gates_apart(graph)
    return _Translation(graph, [kept[copy] for copy in network.layer_inputs.values]).plan(*_head(logits))


def _with_gates_apart(graph: Graph) -> Graph:
    """A gate that the linear layer before it does not include, such as one with a bias, is an operation of its own."""
    operations: list[Operation] = []
    for op in graph.operations:
        if isinstance(op, Multiply) and op.gate is not None and not _includes_gate(graph, op):
            gated = Value(op.inputs[0].network)
            operations.append(AnyGate(op.inputs, (gated,), op.gate))
            op = dataclasses.replace(op, inputs=(gated,), gate=None)
        operations.append(op)
    return Graph(operations, graph.result, graph.kept)


def _includes_gate(graph: Graph, op: Multiply) -> bool:
    before = graph.made_by(Multiply, op.inputs[0])
    included = None if before is None else before.layer.native()
    return included is not None and op.gate is not None and included.struct.gate == GATES[op.gate]


def _head(logits: Network | None) -> tuple[PackedLinear | None, float | None, float | None]:
    """The head, and the factor and then the limit of what it gives; None: there is none, or more is done to logits."""
    match logits.operations if logits is not None else []:
        case [Head() as head]:
            return head.layer.native(), None, None
        case [Head() as head, Scale() as scale]:
            return head.layer.native(), scale.factor, None
        case [Head() as head, SoftCap() as cap]:
            return head.layer.native(), None, cap.limit
        case [Head() as head, Scale() as scale, SoftCap() as cap]:
            return head.layer.native(), scale.factor, cap.limit
    return None, None, None


def plan_source(network: Network, token_ids: Tensor, positions: Tensor) -> Tensor | StepTokens:
    """[T], [T] int64 -> [T, E], or tokens: what a plan of the network begins with. Raises IndexError for a token that
    has no embedding."""
    first = network.operations[0]
    if not isinstance(first, Embed):
        raise NotPlannable(WHOLE_ONLY)
    layer = first.layer
    tables = layer.native() if isinstance(layer, EmbeddingSum) else None
    if tables is None or not isinstance(layer, EmbeddingSum):
        return layer(*(token_ids, positions)[: len(first.inputs)])
    lowest, highest = token_ids.aminmax()
    if int(lowest) < 0 or int(highest) >= len(tables[0]):
        raise IndexError(f"tokens {int(lowest)} to {int(highest)} are not all among the {len(tables[0])} embeddings")
    return StepTokens(token_ids.contiguous(), layer.types_of_step())


class _Translation:
    """Operations become those of a builder, one by one; values become buffers."""

    def __init__(self, graph: Graph, given: Sequence[Value]) -> None:
        """`given`: read by the plan's caller beside the result."""
        self.graph = graph
        self._given = given
        self.builder = PlanBuilder()
        self.buffers: dict[Value, int] = {}
        self._names: dict[Value, str] = {}
        self._free: dict[str, list[str]] = {}
        """By what a buffer is for and its width, names of those that may be written again."""
        self._waiting: list[str] = []
        """Names of buffers that a norm has read last: threads do not wait for each other after a norm."""
        self.columns: dict[Value, int] = {}
        """Of values that are part of a buffer: where they begin."""
        self.look_ups: dict[int, LookUp] = {}
        """Buffers that the caller gives: what makes them of tokens."""
        self.shapes: dict[Value, tuple[int, ...]] = {}
        """Of the rows of values, where they are not one row of a buffer."""
        self._num_names = 0
        self._normed: Value | None = None
        self._sums: list[Value] = []
        """Which one thread may still be writing."""
        self._stored: set[Value] = set()
        """What norms gave that is in its buffer for all threads, or is when they have next waited for each other."""
        self._waited: set[Value] = set()
        """Those for which they have."""

    def plan(self, head: PackedLinear | None, factor: float | None, limit: float | None) -> LayerPlan:
        """`factor`, `limit`: of logits. Raises NotPlannable."""
        operations = self.graph.operations
        if not operations or not isinstance(operations[0], Embed):
            raise NotPlannable(WHOLE_ONLY)
        for op in operations:
            self._check_order(op)
            if any(value in self.columns for value in op.inputs) and not isinstance(op, Product):
                raise NotPlannable(f"{type(op).__name__} reads part of what another operation gives")
            _translate(op, self)
            self._release(op)
        if not isinstance(operations[-1], Norm | AddNorm):
            raise NotPlannable(WHOLE_ONLY)
        embedded = operations[0].outputs[0]
        result = operations[-1].outputs[0]
        if any(self.is_normed(value) or value not in self.buffers for value in self._given):
            raise NotPlannable("what a norm gives is kept")
        attend = max((place for place, op in enumerate(operations) if isinstance(op, _ATTENDS)), default=0)
        late = any(self.graph.place[self.graph.maker[value]] > attend for value in self._given)
        given = [self.buffers[value] for value in self._given]
        plan = self.builder.finish(self.buffers[embedded], self.buffers[result], head, factor, limit, given, late)
        plan.look_ups = self.look_ups
        return plan

    def name(self, value: Value, use: str, width: int) -> str:
        """A buffer for a value: the name of one that is free. `use`: norm, or anything else."""
        pool = f"{use}.{width}"
        free = self._free.setdefault(pool, [])
        if not free:
            self._num_names += 1
            free.append(f"{pool}.{self._num_names}")
        self._names[value] = free.pop()
        return self._names[value]

    def lie_in(self, out: Value, source: Value) -> None:
        """A value is another one, in its buffer."""
        self.buffers[out] = self.buffers[source]
        if source in self._names:
            self._names[out] = self._names.pop(source)

    def keep(self, value: Value) -> None:
        """A value's buffer is written once."""
        self._names.pop(value, None)

    def _check_order(self, op: Operation) -> None:
        """Of a few rows each thread has one norm at a time, and one of them writes the sum. Raises NotPlannable."""
        reads_norm = [value for value in op.inputs if self.is_normed(value)]
        if any(value is not self._normed and value not in self._waited for value in reads_norm):
            raise NotPlannable("a norm is read right after the next one")
        if any(value in self._sums for value in op.inputs):
            raise NotPlannable("a sum is read right after the norm that adds it up")
        if isinstance(op, Norm | AddNorm) and not self._is_of_parts(op):
            self._normed = op.outputs[0]
            self._sums += op.outputs[1:]
        else:
            self._sums = []
        if isinstance(op, Multiply | Scale | ScaleLearnt):
            self._waited |= self._stored

    def is_stored(self, op: Norm | AddNorm) -> bool:
        """Whether what a norm gives is read after the next one."""
        out = op.outputs[0]
        place = self.graph.place
        last = self.graph.last.get(out)
        if last is None:
            return False
        between = self.graph.operations[place[op] + 1 : place[last]]
        stored = any(isinstance(later, Norm | AddNorm) and not self._is_of_parts(later) for later in between)
        if stored:
            self._stored.add(out)
        return stored

    def is_normed(self, value: Value) -> bool:
        """Whether a norm of whole rows gave it."""
        op = self.graph.maker.get(value)
        return isinstance(op, Norm | AddNorm) and value is op.outputs[0] and not self._is_of_parts(op)

    def _is_of_parts(self, op: Operation) -> bool:
        return isinstance(op, Norm) and self.graph.made_by(PerHead, op.inputs[0]) is not None

    def _release(self, op: Operation) -> None:
        """Buffers that nothing reads any more may be written again."""
        ended = [value for value in self.graph.ends_at(op) if value not in self._given]
        names = [self._names.pop(value) for value in ended if value in self._names]
        if isinstance(op, Norm | AddNorm) and not self._is_of_parts(op):
            self._waiting += names
            return
        for name in (*self._waiting, *names):
            self._free[name.rpartition(".")[0]].append(name)
        self._waiting = []


@functools.singledispatch
def _translate(op: Operation, to: _Translation) -> None:
    """Add the operation to the builder. Raises NotPlannable."""
    raise NotPlannable(f"{type(op).__name__} has no native form")


@_translate.register
def _(op: Embed, to: _Translation) -> None:
    out = op.outputs[0]
    if op is to.graph.operations[0]:
        tables = op.layer.native() if isinstance(op.layer, EmbeddingSum) else None
        if tables is None:
            to.buffers[out] = to.builder.buffer("embedded", op.layer.size)
        else:
            to.buffers[out] = to.builder.embed(tables, "embedded")
        return
    tokens = to.graph.maker.get(op.inputs[0])
    if len(op.inputs) > 1 or not (tokens is None or isinstance(tokens, Call)):
        raise NotPlannable("what is embedded depends on more than tokens")
    buffer = to.builder.buffer(f"embedded.{len(to.look_ups)}", op.layer.size)
    to.buffers[out] = buffer
    to.look_ups[buffer] = _LookUp(op.layer, None if tokens is None else tokens.function)


@dataclass(frozen=True, slots=True)
class _LookUp:
    """What is embedded beside a network's inputs."""

    layer: Embeds
    of_tokens: Callable[[Tensor], Tensor] | None
    """Which tokens are embedded; None: the inputs."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        tokens = token_ids if self.of_tokens is None else self.of_tokens(token_ids)
        found: Tensor = self.layer(tokens).contiguous()
        return found

    def native(self) -> TokenTable | None:
        """None where there is no such form."""
        layer, first = self.layer, self.of_tokens
        table = layer.native() if isinstance(layer, Embedding) else None
        if table is None or not isinstance(layer, Embedding) or not isinstance(first, FirstTokens | None):
            return None
        rows = len(table) if isinstance(table, Tensor) else int(table.struct.rows)
        scale = 1.0 if layer.scale is None else float(layer.scale)
        return TokenTable(table, scale, rows if first is None else first.count)


@_translate.register
def _(op: Call, to: _Translation) -> None:
    """What only tokens go into is for what is embedded, outside of the plan."""
    if isinstance(op.function, StreamFunction):
        _add_streams(op, op.function, to)
        return
    tokens = to.graph.operations[0].inputs[0]
    if op.inputs != (tokens,) or not all(isinstance(op, Embed) for op in to.graph.readers[op.outputs[0]]):
        raise NotPlannable("Call has no native form")


def _add_streams(op: Call, function: StreamFunction, to: _Translation) -> None:
    sources = [to.buffers[value] for value in op.inputs]
    shapes = [
        to.shapes.get(value, (to.builder.width(source),)) for value, source in zip(op.inputs, sources, strict=True)
    ]
    out = op.outputs[0]
    shape = to.shapes[out] = function.shape(*shapes)
    width = math.prod(shape)
    to.buffers[out] = to.builder.streams(sources, function, width, to.name(out, "sum", width))


@_translate.register
def _(op: Norm, to: _Translation) -> None:
    out = op.outputs[0]
    source = to.buffers[op.inputs[0]]
    if to.is_normed(out):
        name = to.name(out, "norm", op.layer.size)
        to.buffers[out] = to.builder.norm(source, op.layer.native(), name, stored=to.is_stored(op))
        return
    if op.layer.centers or to.is_normed(op.inputs[0]):
        raise NotPlannable("a norm of parts is a LayerNorm, or of what a norm gave")
    name = to.name(out, "sum", to.builder.width(source))
    to.buffers[out] = to.builder.norm_parts(source, op.layer.native(), name)


@_translate.register
def _(op: AddNorm, to: _Translation) -> None:
    out, total = op.outputs
    # Of a few rows each thread finds in memory of its own what a norm gave, as an input.
    x, residual = (to.buffers[value] for value in sorted(op.inputs, key=to.is_normed, reverse=True))
    names = to.name(out, "norm", op.layer.size), to.name(total, "sum", op.layer.size)
    stored = to.is_stored(op)
    to.buffers[out], to.buffers[total] = to.builder.add_norm(x, residual, op.layer.native(), *names, stored=stored)


@_translate.register
def _(op: Add, to: _Translation) -> None:
    first, second = (to.buffers[value] for value in op.inputs)
    out = op.outputs[0]
    to.buffers[out] = to.builder.add(first, second, to.name(out, "sum", to.builder.width(first)))


@_translate.register
def _(op: Scale, to: _Translation) -> None:
    _scale(op, op.factor, to)


@_translate.register
def _(op: ScaleLearnt, to: _Translation) -> None:
    _scale(op, float(op.factor()), to)


def _scale(op: Operation, factor: float, to: _Translation) -> None:
    source = to.buffers[op.inputs[0]]
    out = op.outputs[0]
    to.buffers[out] = to.builder.scale(source, factor, to.name(out, "sum", to.builder.width(source)))


@_translate.register
def _(op: Product, to: _Translation) -> None:
    first, second = op.inputs
    if first in to.columns or to.is_normed(first) or to.is_normed(second):
        raise NotPlannable("a product is of part of something, or of what a norm gave")
    out = op.outputs[0]
    source = to.buffers[first]
    name = to.name(out, "sum", to.builder.width(source))
    to.buffers[out] = to.builder.multiply(source, to.buffers[second], to.columns.get(second, 0), name)


@_translate.register(PerHead)
@_translate.register(Join)
def _(op: Operation, to: _Translation) -> None:
    if len(op.inputs) > 1 or to.is_normed(op.inputs[0]) or len(to.graph.readers[op.inputs[0]]) > 1:
        raise NotPlannable(f"{type(op).__name__} is of several, of what a norm gave, or of what others read")
    to.lie_in(op.outputs[0], op.inputs[0])


@_translate.register
def _(op: Split, to: _Translation) -> None:
    source = op.inputs[0]
    if to.is_normed(source):
        raise NotPlannable("what a norm gave is split")
    to.keep(source)
    column = 0
    for value, size in zip(op.outputs, op.sizes, strict=True):
        to.buffers[value] = to.buffers[source]
        to.columns[value] = column
        column += size


@_translate.register
def _(op: EmbedPositions, to: _Translation) -> None:
    out = op.outputs[0]
    table = op.layer.weight
    to.buffers[out] = to.builder.look_up(table, to.name(out, "sum", table.shape[1]))


@_translate.register
def _(op: Multiply, to: _Translation) -> None:
    _add_linear(op, to, _packed(op, to))


@_translate.register
def _(op: MultiplyActivate, to: _Translation) -> None:
    _add_linear(op, to, with_activation(_packed(op, to), op.activation))


@_translate.register
def _(op: AnyGate, to: _Translation) -> None:
    if op.activation not in PLAN_GATES:
        raise NotPlannable(f"a gate of {op.activation} has no native form")
    source = to.buffers[op.inputs[0]]
    out = op.outputs[0]
    name = to.name(out, "linear", to.builder.width(source) // 2)
    to.buffers[out] = to.builder.gate(source, PLAN_GATES[op.activation], name)


def _add_linear(op: Multiply, to: _Translation, packed: PackedLinear) -> None:
    out = op.outputs[0]
    reader = to.graph.only_reader(out)
    width = packed.out_features
    if isinstance(reader, ProjectedAttend) and reader.key_is_value:
        width += reader.layer.spec.num_kv_heads * reader.layer.spec.head_size
    to.buffers[out] = to.builder.linear(to.buffers[op.inputs[0]], packed, to.name(out, "linear", width), width)


def _packed(op: Multiply, to: _Translation) -> PackedLinear:
    """The layer's weight as native code takes it. Raises NotPlannable."""
    packed = op.layer.native()
    if packed is None:
        raise NotPlannable(f"{op.layer.name} has no native form")
    return packed


@_translate.register
def _(op: Route, to: _Translation) -> None:
    packed, routing = op.layer.native(), op.layer.native_routing()
    if packed is None or routing is None:
        raise NotPlannable(f"{op.layer.name} has no native form")
    chosen, weights = op.outputs
    name = to.name(chosen, "routed", routing.width)
    to.buffers[chosen] = to.buffers[weights] = to.builder.route(to.buffers[op.inputs[0]], packed, routing, name)


@_translate.register
def _(op: ApplyExperts, to: _Translation) -> None:
    x, chosen, weights = op.inputs
    routed = to.buffers[chosen]
    layer = op.layer.native(to.builder.width(routed) // 2)
    if layer is None or routed != to.buffers[weights]:
        raise NotPlannable(f"{op.layer.name} has no native form")
    out = op.outputs[0]
    source = to.buffers[x]
    to.buffers[out] = to.builder.experts(source, routed, layer, to.name(out, "sum", to.builder.width(source)))


@_translate.register
def _(op: HeadsAttend, to: _Translation) -> None:
    layer = op.layer
    rotary = op.rotary
    native = layer.native()
    if native is None:
        raise NotPlannable(f"{layer.name} does not run natively")
    query_norm, key_norm = [norm.native() for norm in op.norms] or (None, None)
    rope = None if rotary is None else (rotary.cos, rotary.sin)
    cache = None if layer.spec.bidirectional else layer.cache
    parts = AttentionParts(layer.name, native, cache, rope, (query_norm, key_norm, None))
    out = op.outputs[0]
    name = to.name(out, "linear", native.num_heads * native.head_size)
    to.buffers[out] = to.builder.attention(to.buffers[op.inputs[0]], parts, name)


def _native_norm(norm: HeadNorm) -> NormWeight:
    found = norm.native()
    if found is None:
        raise NotPlannable(f"{norm.name} is over the heads of several ranks")
    return found


@_translate.register
def _(op: ProjectedAttend, to: _Translation) -> None:
    layer = op.layer
    native = layer.native()
    if native is None or layer.spec.bidirectional:
        raise NotPlannable(f"{layer.name} does not run natively")
    first, second, third = (None if norm is None else _native_norm(norm) for norm in op.norms)
    there = [norm for norm in (first, second, third) if norm is not None]
    kinds = {type(norm) for norm in op.norms if norm is not None}
    if len(kinds) > 1 or len({(norm.eps, norm.weight.dtype) for norm in there}) > 1:
        raise NotPlannable(f"{layer.name} has norms that differ by more than their weights")
    parts = AttentionParts(
        layer.name,
        native,
        layer.cache,
        None if op.rotary is None else (op.rotary.cos, op.rotary.sin),
        (first, second, third),
        key_is_value=op.key_is_value,
        whole_norms=RMSNormOfAllHeads in kinds,
        shared=layer.kv_owner is not None,
        norms_last=op.norms_last,
        growth=None if op.growth is None else op.growth.native(),
    )
    out = op.outputs[0]
    name = to.name(out, "linear", native.num_heads * native.head_size)
    to.buffers[out] = to.builder.attention(to.buffers[op.inputs[0]], parts, name)


@_translate.register
def _(op: LatentAttend, to: _Translation) -> None:
    layer = op.layer
    native, heads = layer.native(), op.absorbed.native()
    if native is None or heads is None:
        raise NotPlannable(f"{layer.name} does not run natively")
    rope = op.rotary.cos, op.rotary.sin
    parts = LatentParts(layer.name, native, layer.cache, rope, op.norm.native(), heads.absorb, heads.expand)
    query, kept = (to.buffers[value] for value in op.inputs[:2])
    out = op.outputs[0]
    name = to.name(out, "linear", native.num_heads * op.absorbed.sizes[1])
    to.buffers[out] = to.builder.latent_attention(query, kept, parts, name)


@_translate.register
def _(op: RotaryTable, to: _Translation) -> None:
    """Native code looks positions up itself."""
