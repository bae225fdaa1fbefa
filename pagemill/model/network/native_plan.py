"""`make_plan`: a network as a plan that native code runs on a CPU, where every operation has a native form.

Knows operations and what native code asks of a plan's buffers; nothing about models.
"""

import functools

import torch

from pagemill.model.kernels.layer_plan import AttentionParts, LayerPlan, PlanBuilder
from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.native import library
from pagemill.model.network.operations import Embed, Multiply, Network, Norm, Operation, RotaryTable, Value
from pagemill.model.network.rewrite import AddNorm, Graph, HeadsAttend, fuse_attention, fuse_gates, fuse_sums
from pagemill.model.quantization.panels import GATES


class NotPlannable(Exception):
    """Some part of a network has no native form; the message says which."""


def make_plan(network: Network, head: PackedLinear | None, dtype: torch.dtype) -> LayerPlan:
    """The plan of a network, of weights that are loaded and caches that are there; with a `head`, to the logits.

    Raises NotPlannable."""
    if dtype != torch.bfloat16 or library() is None:
        raise NotPlannable("only models in bfloat16, with native kernels, run as a plan")
    graph = Graph(network.operations, network.result)
    for fuse in (fuse_gates, fuse_attention, fuse_sums):
        graph = fuse(graph)
    return _Translation(graph).plan(head)


class _Translation:
    """Operations become those of a builder, one by one; values become buffers."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
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

    def plan(self, head: PackedLinear | None) -> LayerPlan:
        """Raises NotPlannable."""
        operations = self.graph.operations
        if not operations or not isinstance(operations[0], Embed) or not isinstance(operations[-1], Norm | AddNorm):
            raise NotPlannable("only whole models run as a plan, from the embedding to the last norm")
        for op in operations:
            self._check_order(op)
            _translate(op, self)
            self._release(op)
        embedded, result = operations[0].outputs[0], operations[-1].outputs[0]
        return self.builder.finish(self.buffers[embedded], self.buffers[result], head)

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
        reads_norm = [value for value in op.inputs if self.graph.made_by(Norm, value) or self._is_normed(value)]
        if any(value is not self._normed for value in reads_norm):
            raise NotPlannable("a norm is read after the next one")
        if any(value in self._sums for value in op.inputs):
            raise NotPlannable("a sum is read right after the norm that adds it up")
        if isinstance(op, Norm | AddNorm):
            self._normed = op.outputs[0]
            self._sums += op.outputs[1:]
        else:
            self._sums = []

    def _is_normed(self, value: Value) -> bool:
        op = self.graph.made_by(AddNorm, value)
        return op is not None and value is op.outputs[0]

    def _release(self, op: Operation) -> None:
        """Buffers that nothing reads any more may be written again."""
        last = [value for value in (*op.inputs, *op.outputs) if value in self._names and self._is_last(value, op)]
        names = [self._names.pop(value) for value in dict.fromkeys(last)]
        if isinstance(op, Norm | AddNorm):
            self._waiting += names
            return
        for name in (*self._waiting, *names):
            self._free[name.rpartition(".")[0]].append(name)
        self._waiting = []

    def _is_last(self, value: Value, op: Operation) -> bool:
        readers = self.graph.readers.get(value, [])
        return value is not self.graph.result and (not readers or readers[-1] is op)


@functools.singledispatch
def _translate(op: Operation, to: _Translation) -> None:
    """Add the operation to the builder. Raises NotPlannable."""
    raise NotPlannable(f"{type(op).__name__} has no native form")


@_translate.register
def _(op: Embed, to: _Translation) -> None:
    to.buffers[op.outputs[0]] = to.builder.buffer("embedded", op.layer.size)


@_translate.register
def _(op: Norm, to: _Translation) -> None:
    out, norm = op.outputs[0], op.layer.native()
    to.buffers[out] = to.builder.norm(to.buffers[op.inputs[0]], norm, to.name(out, "norm", op.layer.size))


@_translate.register
def _(op: AddNorm, to: _Translation) -> None:
    out, total = op.outputs
    x, residual = (to.buffers[value] for value in op.inputs)
    names = to.name(out, "norm", op.layer.size), to.name(total, "sum", op.layer.size)
    to.buffers[out], to.buffers[total] = to.builder.add_norm(x, residual, op.layer.native(), *names)


@_translate.register
def _(op: Multiply, to: _Translation) -> None:
    out, packed = op.outputs[0], op.layer.native()
    if packed is None:
        raise NotPlannable(f"{op.layer.name} has no native form")
    if op.gate is not None:
        before = to.graph.made_by(Multiply, op.inputs[0])
        included = None if before is None else before.layer.native()
        if included is None or included.struct.gate != GATES[op.gate]:
            raise NotPlannable(f"{op.layer.name} comes after an activation that the layer before it does not include")
    name = to.name(out, "linear", packed.out_features)
    to.buffers[out] = to.builder.linear(to.buffers[op.inputs[0]], packed, name)


@_translate.register
def _(op: HeadsAttend, to: _Translation) -> None:
    layer, rotary, native = op.layer, op.rotary, op.layer.native()
    if native is None:
        raise NotPlannable(f"{layer.name} does not run natively")
    norms = [norm.native() for norm in op.norms]
    parts = AttentionParts(layer.name, native, layer.cache, rotary.cos, rotary.sin, *norms)
    out = op.outputs[0]
    name = to.name(out, "linear", native.num_heads * native.head_size)
    to.buffers[out] = to.builder.attention(to.buffers[op.inputs[0]], parts, name)


@_translate.register
def _(op: RotaryTable, to: _Translation) -> None:
    """Native code looks positions up itself."""
