"""`Program`: a network as functions of tensors in the order in which they run - torch's on a CPU and for compilers,
Triton's on a GPU. Which of its fused kernels a step runs, a weight and the kernels choose by the number of rows.

Knows operations and weights; nothing about models.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.kernels import ops
from pagemill.model.kernels.packed_layer import LayerWeights, between
from pagemill.model.kernels.rows import rows_at
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.norm import LayerNorm, RMSNorm
from pagemill.model.network.operations import (
    Absorb,
    Activate,
    Add,
    AllReduce,
    AnyGate,
    ApplyExperts,
    Attend,
    Call,
    Embed,
    EmbedPositions,
    Expand,
    Gate,
    GatherTokens,
    Head,
    Join,
    Keep,
    Multiply,
    Network,
    Norm,
    Operation,
    PerHead,
    Product,
    ReturnTokens,
    RotaryTable,
    Rotate,
    Route,
    Scale,
    ScaleLearnt,
    Select,
    SoftCap,
    Split,
    SplitHeads,
)
from pagemill.model.network.rewrite import (
    AddNorm,
    AttendSelected,
    ChainPair,
    Graph,
    HeadsAttend,
    LatentAttend,
    NormChain,
    fuse_attention,
    fuse_chains,
    fuse_gates,
    fuse_norms,
    fuse_selection,
    fuse_sums,
    select_rows,
)
from pagemill.model.quantization.interface import LinearWeight

Function: TypeAlias = Callable[..., Any]
"""Of the tensors of an operation's inputs: the tensor that is its output, or a tuple of them."""

FUSIONS = (fuse_gates, fuse_attention, fuse_selection, fuse_sums, fuse_norms, fuse_chains)


def fused(network: Network, *, selects: bool = False) -> Graph:
    """The operations that a program of the network runs; weights need not be there. `selects`: whether rows of the
    result may be asked for."""
    graph = Graph(network.operations, network.result, network.layer_inputs.values)
    if selects:
        graph = select_rows(graph)
    for fuse in FUSIONS:
        graph = fuse(graph)
    return graph


class Program:
    """Runs a network's operations. Made when weights are loaded; weights and layers must then stay as they are."""

    def __init__(self, network: Network, graph: Graph | None = None) -> None:
        """`graph`: what `fused` makes of the network; by default, without selecting rows."""
        graph = graph or fused(network)
        places = {network.inputs: 0, network.positions: 1, network.rows: 2}
        for op in graph.operations:
            for value in op.outputs:
                places[value] = len(places)
        self._steps = tuple(
            (
                _function(op),
                tuple(places[value] for value in op.inputs),
                tuple(places[value] for value in op.outputs),
                tuple(places[value] for value in graph.ends_at(op)),
            )
            for op in graph.operations
        )
        self._num_values = len(places)
        self._result = places[graph.result]
        self._kept = [places[value] for value in graph.kept]

    def run(self, inputs: Tensor, positions: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """[T] int64 token ids or [T, E], [T] int64 -> [T, E]; of `rows`, [L] int64, [L, E]. `positions` and `rows` may
        be left out where nothing reads them."""
        found: Tensor = self._run(inputs, positions, rows)[self._result]
        return found

    def run_and_keep(
        self, inputs: Tensor, positions: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `run`, and [T, E] each, what the network keeps."""
        values = self._run(inputs, positions, rows)
        return values[self._result], tuple(values[place] for place in self._kept)

    def _run(self, inputs: Tensor, positions: Tensor | None, rows: Tensor | None) -> list[Any]:
        """All values that are needed in the end."""
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
        return values


def _function(op: Operation) -> Function:
    """What computes an operation."""
    function = _FUNCTIONS.get(type(op))
    if function is None:
        raise TypeError(f"there is no way to compute {type(op).__name__}")
    return function(op)


def _add_norm(op: AddNorm) -> Function:
    norm = op.layer.forward

    def add_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return norm(x, residual), residual

    return add_norm


def _multiply(op: Multiply) -> Function:
    weight = weight_of(op.layer)
    bias = op.layer.own_bias
    activation = op.gate
    width = op.layer.num_columns
    if activation is None:
        return lambda x: weight.apply(x, bias)

    def gate_and_multiply(x: Tensor) -> Tensor:
        return weight.apply(x, bias) if x.shape[1] == width else weight.gated_apply(x, activation, bias)

    return gate_and_multiply


def _norm_chain(op: NormChain) -> Function:
    norm = _norm_of(op.layer)
    if op.before is None:
        return _norm_after(None, norm, op.after)
    before = _function(op.before)
    layer = op.before.layer
    plain = None if layer.own_bias is not None else weight_of(layer).plain
    if plain is None:
        return _norm_after(before, norm, op.after)
    return _multiply_and_norm(plain, op.before.gate, norm, op.after)


def _norm_after(before: Function | None, norm: tuple[Tensor, float], after: Multiply | None) -> Function:
    """A norm of what `before` gives, which the linear layer after it may compute with its own product."""
    weight = None if after is None else weight_of(after.layer)
    bias = None if after is None else after.layer.own_bias

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
    weight = None if after is None else weight_of(after.layer)
    bias = None if after is None else after.layer.own_bias

    def run(x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if activation is not None and x.shape[1] != before.shape[1]:
            x = ops.gated(x, activation)
        if weight is not None and weight.plain is not None:
            result, total = ops.linear_norm_linear(x, before, residual, norm, weight.plain, bias, weight.gate)
            return result if residual is None else (result, total)
        normed = ops.linear_norm(x, before, norm, residual)
        return _with(residual, normed if weight is None else weight.apply(normed, bias))

    return run


def _chain_pair(op: ChainPair) -> Function:
    """One after the other, but for few rows where a kernel does both."""
    first = _norm_chain(op.first)
    second = _norm_chain(op.second)
    weights = _weights_between(op)
    together = None if weights is None else between(weights)

    def run(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if together is not None and together.takes(x):
            return together.run(x, residual)
        inner, total = first(x, residual)
        result: tuple[Tensor, Tensor] = second(inner, total)
        return result

    return run


def _weights_between(op: ChainPair) -> LayerWeights | None:
    """What is between two attentions: o, gate and up, down, qkv; None where it is anything else."""
    parts = op.first.before, op.first.after, op.second.before, op.second.after
    layers = [part.layer for part in parts if part is not None]
    weights = [weight_of(layer) for layer in layers]
    packed = [weight.packed for weight in weights if weight.packed is not None]
    gates = [None if part is None else part.gate for part in parts]
    if len(packed) < len(parts) or any(layer.own_bias is not None for layer in layers):
        return None
    if gates != [None, None, "silu", None] or [weight.gate for weight in weights] != [None, "silu", None, None]:
        return None
    (norm1, eps1), (norm2, eps2) = _norm_of(op.first.layer), _norm_of(op.second.layer)
    o, gate_up, down, qkv = packed
    return LayerWeights(o, gate_up, down, qkv, norm1, norm2, (eps1, eps2))


def _with(residual: Tensor | None, result: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    return result if residual is None else (result, residual)


def _attend(op: Attend) -> Function:
    def attend(query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        attended: Tensor = op.layer(query, key, value)
        return attended.reshape(len(query), -1)

    return attend


def _heads_attend(op: HeadsAttend, asked_only: bool = False) -> Function:
    layer = op.layer
    num_heads = op.heads.num_heads
    head_size = op.heads.head_size
    norms = (_norm_of(op.norms[0]), _norm_of(op.norms[1])) if op.norms else None

    def attend_unturned(qkv: Tensor) -> Tensor:
        query, key, value = ops.split_heads(qkv, num_heads, head_size)
        if norms is not None:
            query = _norm(query, norms[0])
            key = _norm(key, norms[1])
        attended: Tensor = layer(query, key, value, asked_only=asked_only)
        return attended.reshape(len(qkv), -1)

    def attend(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        target = layer.write_target()
        query, key, value = ops.attention_inputs(qkv, num_heads, head_size, (cos, sin), norms, target)
        attended: Tensor = layer(query, key, value, written=target is not None, asked_only=asked_only)
        return attended.reshape(len(qkv), -1)

    return attend_unturned if op.rotary is None else attend


def _attend_selected(op: AttendSelected) -> Function:
    attend, attend_asked = (
        _heads_attend(op.attend, asked_only)
        if isinstance(op.attend, HeadsAttend)
        else _latent_attend(op.attend, asked_only)
        for asked_only in (False, True)
    )

    def run(*inputs: Tensor | None) -> Tensor:
        *parts, rows = inputs
        return attend(*parts) if rows is None else rows_at(attend_asked(*parts), rows)

    return run


def _latent_attend(op: LatentAttend, asked_only: bool = False) -> Function:
    layer = op.layer
    norm = _norm_of(op.norm)
    latent_size = len(op.norm.weight)

    def attend(query: Tensor, kept: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = query.view(len(query), layer.spec.num_heads, -1)
        latent = kept[:, -latent_size:]
        latent.copy_(_norm(latent, norm))
        kept = kept.unsqueeze(1)
        ops.rotate_(query, cos, sin)
        ops.rotate_(kept, cos, sin)
        return layer.forward_latents(query, kept, op.absorbed, asked_only=asked_only)

    return attend


def weight_of(layer: Linear) -> LinearWeight:
    """A layer's weight. Raises ModelError when it has not been loaded."""
    if layer.weight is None:
        raise ModelError(f"{layer.name} has no weight yet")
    return layer.weight


def _norm_of(layer: RMSNorm | LayerNorm) -> tuple[Tensor, float]:
    return layer.weight, layer.eps


def _norm(x: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    return ops.rms_norm(x, *norm)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = x.clone()
    ops.rotate_(turned, cos, sin)
    return turned


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else rows_at(x, rows)


def _per_head(x: Tensor, num_heads: int) -> Tensor:
    return x.view(len(x), num_heads, -1)


def _join(*parts: Tensor) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=-1)


_FUNCTIONS: Mapping[type[Operation], Callable[[Any], Function]] = {
    Embed: attrgetter("layer"),
    EmbedPositions: attrgetter("layer"),
    Head: attrgetter("layer"),
    ApplyExperts: attrgetter("layer"),
    Route: attrgetter("layer.choose"),
    GatherTokens: attrgetter("exchange.gather"),
    ReturnTokens: attrgetter("exchange.add_up"),
    AllReduce: attrgetter("layer.sum_up"),
    RotaryTable: attrgetter("rotary.at"),
    Absorb: attrgetter("layer.absorb"),
    Expand: attrgetter("layer.expand"),
    Call: attrgetter("function"),
    Norm: lambda op: op.layer.forward if op.layer.centers else partial(_norm, norm=_norm_of(op.layer)),
    SoftCap: lambda op: partial(ops.soft_cap, limit=op.limit),
    Gate: lambda op: partial(ops.gated, gate=op.activation),
    AnyGate: lambda op: partial(ops.any_gated, activation=op.activation),
    Activate: lambda op: partial(ops.activated, activation=op.activation),
    SplitHeads: lambda op: partial(ops.split_heads, num_heads=op.num_heads, head_size=op.head_size),
    PerHead: lambda op: partial(_per_head, num_heads=op.num_heads),
    Split: lambda op: partial(torch.split, split_size_or_sections=list(op.sizes), dim=-1),
    Add: lambda op: torch.add,
    Scale: lambda op: partial(torch.mul, other=op.factor),
    ScaleLearnt: lambda op: partial(torch.mul, other=op.factor()),
    Product: lambda op: torch.mul,
    Join: lambda op: _join,
    Rotate: lambda op: _rotated,
    Select: lambda op: _select,
    Keep: lambda op: torch.clone,
    AddNorm: _add_norm,
    Multiply: _multiply,
    NormChain: _norm_chain,
    ChainPair: _chain_pair,
    Attend: _attend,
    HeadsAttend: _heads_attend,
    AttendSelected: _attend_selected,
    LatentAttend: _latent_attend,
}
"""Kind of operation -> what computes one, given the operation."""
