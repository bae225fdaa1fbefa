"""`Network`: what a model computes, as a list of operations on values. A layer is written once, by adding its own.

Knows what operations mean, not how they are computed, on which device, or which of them one kernel does together.

Letters in shapes: T tokens, E hidden size, H heads, D head size, I inner size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from pagemill.model.attention.layer import Attention
from pagemill.model.layers.embedding import Embedding
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.rotary import Rotary


class Value:
    """A tensor of a step, before there is one. Values are added with `+`."""

    def __init__(self, network: "Network") -> None:
        self.network = network

    def __add__(self, other: "Value") -> "Value":
        return self.network.add(self, other)


@dataclass(eq=False)
class Operation:
    """outputs = operation(inputs)."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def row_wise(self) -> bool:
        """Whether a row of the results depends on that row of the inputs only."""
        return True


@dataclass(eq=False)
class Embed(Operation):
    """Token ids -> [T, E]."""

    layer: Embedding


@dataclass(eq=False)
class Norm(Operation):
    """RMSNorm over the last dimension."""

    layer: RMSNorm


@dataclass(eq=False)
class Multiply(Operation):
    """A linear layer, [T, in] -> [T, out]: on each rank its part of the result, or its share of a sum."""

    layer: Linear
    gate: str | None = None
    """Where the input may be twice as wide, the gated activation that comes first."""


@dataclass(eq=False)
class AllReduce(Operation):
    """The sum of what all ranks have computed of a linear layer, and its bias."""

    layer: Linear


@dataclass(eq=False)
class Gate(Operation):
    """[T, 2 * I] -> [T, I]: act(first half) * second half."""

    activation: str
    """silu or gelu_tanh."""


@dataclass(eq=False)
class Add(Operation):
    """The sum of two values of one shape."""


@dataclass(eq=False)
class RotaryTable(Operation):
    """[T] positions -> cos and sin of them, each [T, n]."""

    rotary: Rotary


@dataclass(eq=False)
class Rotate(Operation):
    """[T, H, D], cos, sin -> [T, H, D]: rotary embedding."""

    rotary: Rotary


@dataclass(eq=False)
class SplitHeads(Operation):
    """[T, (H + 2 * Hkv) * D] -> query [T, H, D], key and value [T, Hkv, D]."""

    num_heads: int
    head_size: int


@dataclass(eq=False)
class Attend(Operation):
    """Query [T, H, D], key and value [T, Hkv, D], which go to the cache -> [T, H * D]."""

    layer: Attention

    @property
    def row_wise(self) -> bool:
        return False


@dataclass(eq=False)
class Select(Operation):
    """[T, ...], rows -> [L, ...]: the rows that are asked for, or all."""


@dataclass(eq=False)
class Call(Operation):
    """Any function of tensors, or module of torch, that gives one tensor."""

    function: Callable[..., Tensor]
    by_rows: bool
    """Whether a row of the result depends on that row of the inputs only."""

    @property
    def row_wise(self) -> bool:
        return self.by_rows


@runtime_checkable
class Layer(Protocol):
    """A layer of a model that says what it computes as operations."""

    def operations(self, net: "Network", x: Value) -> Value:
        """Add the layer's operations on x, [T, E]; what they give, [T, E]."""


class Network:
    """Operations in the order in which they were added, which is one in which they can run."""

    def __init__(self, rotaries: Mapping[str, Rotary]) -> None:
        """`rotaries`: by the name that `rotary` is given."""
        self.operations: list[Operation] = []
        self.inputs = Value(self)
        """[T] int64 token ids, or [T, E] from the pipeline stage before."""
        self.positions = Value(self)
        """[T] int64."""
        self.rows = Value(self)
        """[L] int64, ascending: the rows of the result that are asked for; None: all."""
        self.result = self.inputs
        """[T, E]."""
        self._rotaries = rotaries
        self._tables: dict[str, tuple[Value, Value]] = {}

    def embed(self, tokens: Value, layer: Embedding) -> Value:
        """[T] token ids -> [T, E]."""
        return self._one(Embed, (tokens,), layer)

    def norm(self, x: Value, layer: RMSNorm) -> Value:
        """RMSNorm over the last dimension of [T, E] or [T, H, D]."""
        return self._one(Norm, (x,), layer)

    def linear(self, x: Value, layer: Linear) -> Value:
        """[T, in] -> [T, out], summed over the ranks that share the layer's inputs."""
        out = self._one(Multiply, (x,), layer)
        return out if layer.sums_over is None else self._one(AllReduce, (out,), layer)

    def gated(self, x: Value, activation: str) -> Value:
        """[T, 2 * I] -> [T, I]: act(first half) * second half; silu or gelu_tanh."""
        return self._one(Gate, (x,), activation)

    def add(self, first: Value, second: Value) -> Value:
        """The sum of two values of one shape."""
        return self._one(Add, (first, second))

    def heads(self, qkv: Value, num_heads: int, head_size: int) -> tuple[Value, Value, Value]:
        """[T, (H + 2 * Hkv) * D] -> query [T, H, D], key and value [T, Hkv, D]."""
        query, key, value = Value(self), Value(self), Value(self)
        self.operations.append(SplitHeads((qkv,), (query, key, value), num_heads, head_size))
        return query, key, value

    def rotary(self, x: Value, kind: str) -> Value:
        """Rotary embedding of [T, H, D], by the tables of this name."""
        return self._one(Rotate, (x, *self.cos_sin(kind)), self._rotaries[kind])

    def attend(self, query: Value, key: Value, value: Value, layer: Attention) -> Value:
        """[T, H, D], twice [T, Hkv, D] -> [T, H * D]; keys and values go to the layer's cache first."""
        return self._one(Attend, (query, key, value), layer)

    def call(self, function: Callable[..., Tensor], *inputs: Value, by_rows: bool = False) -> Value:
        """function(*inputs): anything that has no operation of its own. It may change inputs that nothing else reads.
        `by_rows`: whether a row of the result depends on that row of the inputs only; it may then be given fewer."""
        return self._one(Call, inputs, function, by_rows)

    def layer(self, layer: nn.Module, x: Value) -> Value:
        """A layer's operations on [T, E]; of a module without any, layer(x, positions)."""
        return layer.operations(self, x) if isinstance(layer, Layer) else self.call(layer, x, self.positions)

    def cos_sin(self, kind: str) -> tuple[Value, Value]:
        """cos and sin of this step's positions, each [T, n], by the tables of this name."""
        if kind not in self._tables:
            self._tables[kind] = Value(self), Value(self)
            self.operations.append(RotaryTable((self.positions,), self._tables[kind], self._rotaries[kind]))
        return self._tables[kind]

    def _one(self, kind: Callable[..., Operation], inputs: Sequence[Value], *details: object) -> Value:
        """One more operation, which has one output."""
        out = Value(self)
        self.operations.append(kind(tuple(inputs), (out,), *details))
        return out
