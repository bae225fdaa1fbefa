"""`make_plan`: a network as a plan that native code runs on a CPU, where every operation has a native form.

Knows operations and what native code asks of a plan's buffers; nothing about models.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.model.kernels.layer_plan import PLAN_GATES, AttentionParts, LayerPlan, PlanBuilder, StepTokens
from pagemill.model.kernels.linear import PackedLinear, with_activation
from pagemill.model.kernels.native import library
from pagemill.model.layers.embedding import EmbeddingSum
from pagemill.model.network.operations import (
    Add,
    AnyGate,
    Embed,
    EmbedPositions,
    Head,
    Keep,
    Multiply,
    Network,
    Norm,
    Operation,
    RotaryTable,
    Scale,
    Value,
)
from pagemill.model.network.rewrite import (
    AddNorm,
    Graph,
    HeadsAttend,
    MultiplyActivate,
    fuse_activations,
    fuse_attention,
    fuse_gates,
    fuse_sums,
)
from pagemill.model.quantization.panels import GATES

WHOLE_ONLY = "only whole models run as a plan, from the embedding to the last norm"


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
    for fuse in (fuse_gates, fuse_activations, fuse_attention, fuse_sums):
        graph = fuse(graph)
    return _Translation(graph, [kept[copy] for copy in network.layer_inputs.values]).plan(*_head(logits))


def _head(logits: Network | None) -> tuple[PackedLinear | None, float | None]:
    """The head and the factor of what it gives; None: there is none, or more is done to logits."""
    match logits.operations if logits is not None else []:
        case [Head() as head]:
            return head.layer.native(), None
        case [Head() as head, Scale() as scale]:
            return head.layer.native(), scale.factor
    return None, None


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
        self._num_names = 0
        self._normed: Value | None = None
        self._sums: list[Value] = []
        """Which one thread may still be writing."""

    def plan(self, head: PackedLinear | None, factor: float | None) -> LayerPlan:
        """`factor`: of logits. Raises NotPlannable."""
        operations = self.graph.operations
        if not operations or not isinstance(operations[0], Embed):
            raise NotPlannable(WHOLE_ONLY)
        for op in operations:
            self._check_order(op)
            _translate(op, self)
            self._release(op)
        if not isinstance(operations[-1], Norm | AddNorm):
            raise NotPlannable(WHOLE_ONLY)
        embedded = operations[0].outputs[0]
        result = operations[-1].outputs[0]
        if any(self.is_normed(value) or value not in self.buffers for value in self._given):
            raise NotPlannable("what a norm gives is kept")
        attend = max((place for place, op in enumerate(operations) if isinstance(op, HeadsAttend)), default=0)
        late = any(self.graph.place[self.graph.maker[value]] > attend for value in self._given)
        given = [self.buffers[value] for value in self._given]
        return self.builder.finish(self.buffers[embedded], self.buffers[result], head, factor, given, late)

    def name(self, value: Value, use: str, width: int) -> str:
        """A buffer for a value: the name of one that is free. `use`: norm, or anything else."""
        pool = f"{use}.{width}"
        free = self._free.setdefault(pool, [])
        if not free:
            self._num_names += 1
            free.append(f"{pool}.{self._num_names}")
        self._names[value] = free.pop()
        return self._names[value]

    def _check_order(self, op: Operation) -> None:
        """Of a few rows each thread has one norm at a time, and one of them writes the sum. Raises NotPlannable."""
        reads_norm = [value for value in op.inputs if self.is_normed(value)]
        if any(value is not self._normed for value in reads_norm):
            raise NotPlannable("a norm is read after the next one")
        if any(value in self._sums for value in op.inputs):
            raise NotPlannable("a sum is read right after the norm that adds it up")
        if isinstance(op, Norm | AddNorm):
            self._normed = op.outputs[0]
            self._sums += op.outputs[1:]
        else:
            self._sums = []

    def is_normed(self, value: Value) -> bool:
        """Whether a norm gave it."""
        op = self.graph.maker.get(value)
        return isinstance(op, Norm | AddNorm) and value is op.outputs[0]

    def _release(self, op: Operation) -> None:
        """Buffers that nothing reads any more may be written again."""
        ended = [value for value in self.graph.ends_at(op) if value not in self._given]
        names = [self._names.pop(value) for value in ended if value in self._names]
        if isinstance(op, Norm | AddNorm):
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
    tables = op.layer.native() if isinstance(op.layer, EmbeddingSum) else None
    if tables is None:
        to.buffers[op.outputs[0]] = to.builder.buffer("embedded", op.layer.size)
    else:
        to.buffers[op.outputs[0]] = to.builder.embed(tables, "embedded")


@_translate.register
def _(op: Norm, to: _Translation) -> None:
    out = op.outputs[0]
    to.buffers[out] = to.builder.norm(to.buffers[op.inputs[0]], op.layer.native(), to.name(out, "norm", op.layer.size))


@_translate.register
def _(op: AddNorm, to: _Translation) -> None:
    out, total = op.outputs
    # Of a few rows each thread finds in memory of its own what a norm gave, as an input.
    x, residual = (to.buffers[value] for value in sorted(op.inputs, key=to.is_normed, reverse=True))
    names = to.name(out, "norm", op.layer.size), to.name(total, "sum", op.layer.size)
    to.buffers[out], to.buffers[total] = to.builder.add_norm(x, residual, op.layer.native(), *names)


@_translate.register
def _(op: Add, to: _Translation) -> None:
    first, second = (to.buffers[value] for value in op.inputs)
    out = op.outputs[0]
    to.buffers[out] = to.builder.add(first, second, to.name(out, "sum", to.builder.width(first)))


@_translate.register
def _(op: Scale, to: _Translation) -> None:
    if to.is_normed(op.inputs[0]):
        raise NotPlannable("a norm is multiplied by a factor")
    source = to.buffers[op.inputs[0]]
    out = op.outputs[0]
    to.buffers[out] = to.builder.scale(source, op.factor, to.name(out, "sum", to.builder.width(source)))


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
    name = to.name(out, "linear", packed.out_features)
    to.buffers[out] = to.builder.linear(to.buffers[op.inputs[0]], packed, name)


def _packed(op: Multiply, to: _Translation) -> PackedLinear:
    """The layer's weight as native code takes it. Raises NotPlannable."""
    packed = op.layer.native()
    if packed is None:
        raise NotPlannable(f"{op.layer.name} has no native form")
    if op.gate is not None:
        before = to.graph.made_by(Multiply, op.inputs[0])
        included = None if before is None else before.layer.native()
        if included is None or included.struct.gate != GATES[op.gate]:
            raise NotPlannable(f"{op.layer.name} comes after an activation that the layer before it does not include")
    return packed


@_translate.register
def _(op: HeadsAttend, to: _Translation) -> None:
    layer = op.layer
    rotary = op.rotary
    native = layer.native()
    if native is None:
        raise NotPlannable(f"{layer.name} does not run natively")
    norms = [norm.native() for norm in op.norms]
    rope = None if rotary is None else (rotary.cos, rotary.sin)
    parts = AttentionParts(layer.name, native, None if layer.spec.bidirectional else layer.cache, rope, *norms)
    out = op.outputs[0]
    name = to.name(out, "linear", native.num_heads * native.head_size)
    to.buffers[out] = to.builder.attention(to.buffers[op.inputs[0]], parts, name)


@_translate.register
def _(op: RotaryTable, to: _Translation) -> None:
    """Native code looks positions up itself."""
