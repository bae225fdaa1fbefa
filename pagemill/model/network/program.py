"""`Program`: a network as functions of tensors in the order in which they run - torch's on a CPU and for compilers,
Triton's on a GPU. Which of its fused kernels a step runs, a weight and the kernels choose by the number of rows.

Knows operations and weights; nothing about models.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.kernels import ops
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.norm import RMSNorm
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
    RotaryTable,
    Rotate,
    Select,
    SplitHeads,
)
from pagemill.model.network.rewrite import (
    AddNorm,
    Graph,
    HeadsAttend,
    NormChain,
    fuse_attention,
    fuse_gates,
    fuse_norms,
    fuse_sums,
    select_rows,
)
from pagemill.model.quantization.interface import LinearWeight

Function: TypeAlias = Callable[..., Any]
"""Of the tensors of an operation's inputs: the tensor that is its output, or a tuple of them."""


class Program:
    """Runs a network's operations. Made when weights are loaded; weights and layers must then stay as they are."""

    def __init__(self, network: Network, *, selects: bool) -> None:
        """`selects`: whether rows of the result may be asked for."""
        graph = Graph(network.operations, network.result)
        if selects:
            graph = select_rows(graph)
        for fuse in (fuse_gates, fuse_attention, fuse_sums, fuse_norms):
            graph = fuse(graph)
        places = {network.inputs: 0, network.positions: 1, network.rows: 2}
        for op in graph.operations:
            for value in op.outputs:
                places[value] = len(places)
        last = {value: op for op in graph.operations for value in (*op.outputs, *op.inputs)}
        last.pop(graph.result, None)
        dead: dict[Operation, list[int]] = {op: [] for op in graph.operations}
        for value, reader in last.items():
            dead[reader].append(places[value])
        self._steps = tuple(
            (
                _function(op),
                tuple(places[value] for value in op.inputs),
                tuple(places[value] for value in op.outputs),
                tuple(dead[op]),
            )
            for op in graph.operations
        )
        self._num_values = len(places)
        self._result = places[graph.result]

    def run(self, inputs: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """[T] int64 token ids or [T, E], [T] int64 -> [T, E]; of `rows`, [L] int64, [L, E]."""
        values: list[Any] = [None] * self._num_values
        values[:3] = inputs, positions, rows
        for function, reads, writes, dead in self._steps:
            result = function(*[values[place] for place in reads])
            if len(writes) == 1:
                values[writes[0]] = result
            else:
                for place, part in zip(writes, result, strict=True):
                    values[place] = part
            for place in dead:
                values[place] = None
        found: Tensor = values[self._result]
        return found


@functools.singledispatch
def _function(op: Operation) -> Function:
    """What computes an operation."""
    raise TypeError(f"there is no way to compute {type(op).__name__}")


@_function.register
def _(op: Embed | Call) -> Function:
    return op.layer if isinstance(op, Embed) else op.function


@_function.register
def _(op: Norm) -> Function:
    return partial(_norm, norm=_norm_of(op.layer))


@_function.register
def _(op: AddNorm) -> Function:
    weight, eps = _norm_of(op.layer)

    def add_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return ops.rms_norm(x, weight, eps, residual), residual

    return add_norm


@_function.register
def _(op: Multiply) -> Function:
    weight, bias, activation, width = weight_of(op.layer), op.layer.own_bias, op.gate, op.layer.num_columns
    if activation is None:
        return lambda x: weight.apply(x, bias)

    def gate_and_multiply(x: Tensor) -> Tensor:
        return weight.apply(x, bias) if x.shape[1] == width else weight.gated_apply(x, activation, bias)

    return gate_and_multiply


@_function.register
def _(op: NormChain) -> Function:
    norm = _norm_of(op.layer)
    if op.before is None:
        return _norm_after(None, norm, op.after)
    before, layer = _function(op.before), op.before.layer
    plain = None if layer.own_bias is not None else weight_of(layer).plain
    if plain is None:
        return _norm_after(before, norm, op.after)
    return _multiply_and_norm(plain, op.before.gate, norm, op.after)


def _norm_after(before: Function | None, norm: tuple[Tensor, float], after: Multiply | None) -> Function:
    """A norm of what `before` gives, which the linear layer after it may compute with its own product."""
    weight, bias = (None, None) if after is None else (weight_of(after.layer), after.layer.own_bias)

    def run(x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = x if before is None else before(x)
        if weight is None:
            return _with(residual, ops.rms_norm(x, *norm, residual))
        result, total = weight.norm_apply(x, residual, norm, bias)
        return result if residual is None else (result, total)

    return run


def _multiply_and_norm(
    before: Tensor, activation: str | None, norm: tuple[Tensor, float], after: Multiply | None
) -> Function:
    """A norm of the product with a plain matrix: kernels may leave part of either to the other."""
    weight, bias = (None, None) if after is None else (weight_of(after.layer), after.layer.own_bias)

    def run(x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if activation is not None and x.shape[1] != before.shape[1]:
            x = ops.gated(x, activation)
        if weight is not None and weight.plain is not None:
            result, total = ops.linear_norm_linear(x, before, residual, norm, weight.plain, bias, weight.gate)
            return result if residual is None else (result, total)
        normed = ops.linear_norm(x, before, norm, residual)
        return _with(residual, normed if weight is None else weight.apply(normed, bias))

    return run


def _with(residual: Tensor | None, result: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    return result if residual is None else (result, residual)


@_function.register
def _(op: AllReduce) -> Function:
    return op.layer.sum_up


@_function.register
def _(op: Gate) -> Function:
    return partial(_gate, activation=op.activation)


@_function.register
def _(op: Add) -> Function:
    return torch.add


@_function.register
def _(op: RotaryTable) -> Function:
    return op.rotary.at


@_function.register
def _(op: Rotate) -> Function:
    return _rotated


@_function.register
def _(op: SplitHeads) -> Function:
    def split(qkv: Tensor) -> tuple[Tensor, ...]:
        num_kv_heads = (qkv.shape[1] // op.head_size - op.num_heads) // 2
        heads = qkv.view(len(qkv), -1, op.head_size)
        return heads.split_with_sizes([op.num_heads, num_kv_heads, num_kv_heads], dim=1)

    return split


@_function.register
def _(op: Attend) -> Function:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended: Tensor = op.layer(query, key, value)
        return attended.reshape(len(query), -1)

    return attend


@_function.register
def _(op: HeadsAttend) -> Function:
    layer, num_heads, head_size = op.layer, op.heads.num_heads, op.heads.head_size
    norms = (_norm_of(op.norms[0]), _norm_of(op.norms[1])) if op.norms else None

    def attend(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        target = layer.write_target()
        query, key, value = ops.attention_inputs(qkv, num_heads, head_size, (cos, sin), norms, target)
        attended: Tensor = layer(query, key, value, written=target is not None)
        return attended.reshape(len(qkv), -1)

    return attend


@_function.register
def _(op: Select) -> Function:
    return _select


def weight_of(layer: Linear) -> LinearWeight:
    """A layer's weight. Raises ModelError when it has not been loaded."""
    if layer.weight is None:
        raise ModelError(f"{layer.name} has no weight yet")
    return layer.weight


def _norm_of(layer: RMSNorm) -> tuple[Tensor, float]:
    return layer.weight, layer.eps


def _norm(x: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    return ops.rms_norm(x, *norm)


def _gate(x: Tensor, activation: str) -> Tensor:
    return ops.gated(x, activation)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = x.clone()
    ops.rotate_(turned, cos, sin)
    return turned


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
