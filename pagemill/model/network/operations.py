"""`Network`: what a model computes, as a list of operations on values. A layer is written once, by adding its own.

Knows what operations mean, not how they are computed, on which device, or which of them one kernel does together.

Letters in shapes: T tokens, E hidden size, H heads, D head size, I inner size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from pagemill.model.attention.layer import Attention
from pagemill.model.layers.activation import GATES
from pagemill.model.layers.embedding import OutputHead, PositionEmbedding
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.mla import AbsorbedLinear
from pagemill.model.layers.moe.exchange import Exchange
from pagemill.model.layers.moe.experts import Experts
from pagemill.model.layers.moe.router import Router
from pagemill.model.layers.norm import AnyNorm
from pagemill.model.layers.rotary import Rotary

NO_ROTARIES: Mapping[str, Rotary] = MappingProxyType({})


class Value:
    """A tensor of a step, before there is one. Values of one shape are added with `+`, and multiplied with `*`."""

    def __init__(self, network: "Network") -> None:
        self.network = network

    def __add__(self, other: "Value") -> "Value":
        return self.network.add(self, other)

    def __mul__(self, other: "Value") -> "Value":
        out = Value(self.network)
        self.network.operations.append(Product((self, other), (out,)))
        return out


@dataclass(eq=False)
class Operation:
    """outputs = operation(inputs)."""

    owns: ClassVar[bool] = True
    """Whether the results have memory of their own, which may be written over when nothing reads them any more."""
    views: ClassVar[bool] = False
    """Whether a result may lie in the memory of an input."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def row_wise(self) -> bool:
        """Whether a row of the results depends on that row of the inputs only."""
        return True


class Embeds(Protocol):
    """A layer that looks up embeddings of tokens."""

    @property
    def size(self) -> int:
        """Elements of an embedding."""

    @property
    def __call__(self) -> Callable[..., Tensor]:
        """([T] token ids, and what else it reads) -> [T, E]."""


@dataclass(eq=False)
class Embed(Operation):
    """Token ids, and whatever else the layer reads, -> [T, E]."""

    layer: Embeds


@dataclass(eq=False)
class Norm(Operation):
    """RMSNorm or LayerNorm over the last dimension."""

    layer: AnyNorm


@dataclass(eq=False)
class EmbedPositions(Operation):
    """[T] positions -> [T, E]."""

    layer: PositionEmbedding


@dataclass(eq=False)
class Multiply(Operation):
    """A linear layer, [T, in] -> [T, out]: on each rank its part of the result, or its share of a sum."""

    layer: Linear
    gate: str | None = None
    """Where the input may be twice as wide, the gated activation that comes first."""


@dataclass(eq=False)
class AllReduce(Operation):
    """The sum of what all ranks have computed of a layer, and its bias where it has one."""

    layer: Linear | Experts


@dataclass(eq=False)
class Gate(Operation):
    """[T, 2 * I] -> [T, I]: act(first half) * second half."""

    activation: str
    """silu or gelu_tanh."""


@dataclass(eq=False)
class AnyGate(Operation):
    """[T, 2 * I] -> [T, I]: act(first half) * second half, which no linear layer includes."""

    activation: str
    """As `ops.activated` calls it."""


@dataclass(eq=False)
class Activate(Operation):
    """act of each element."""

    activation: str
    """As `ops.activated` calls it."""


@dataclass(eq=False)
class Route(Operation):
    """[T, E] -> chosen experts [T, K] int32 and their weights [T, K] float32."""

    layer: Router


@dataclass(eq=False)
class ApplyExperts(Operation):
    """[T, E], chosen experts, their weights -> [T, E]: the weighted sum of those of a token's experts that this rank
    holds, or a slice of each."""

    layer: Experts


@dataclass(eq=False)
class GatherTokens(Operation):
    """Tensors [T, ...] -> [P, ...]: those of all replicas, one after the other."""

    row_wise = False

    exchange: Exchange


@dataclass(eq=False)
class ReturnTokens(Operation):
    """[P, E], each rank's share -> [T, E]: the sums over the ranks for this replica's tokens."""

    owns = False
    views = True
    row_wise = False

    exchange: Exchange


@dataclass(eq=False)
class Add(Operation):
    """The sum of two values of one shape."""


@dataclass(eq=False)
class Scale(Operation):
    """Each element times a factor."""

    factor: float


@dataclass(eq=False)
class ScaleLearnt(Operation):
    """Each element times a number that is loaded with the weights."""

    factor: Callable[[], Tensor]
    """[1], of the model's type."""


@dataclass(eq=False)
class Product(Operation):
    """The product of two values of one shape, element by element."""


@dataclass(eq=False)
class RotaryTable(Operation):
    """[T] positions -> cos and sin of them, each [T, n]."""

    owns = False

    rotary: Rotary


@dataclass(eq=False)
class Rotate(Operation):
    """[T, H, D], cos, sin -> [T, H, D]: rotary embedding."""

    rotary: Rotary


@dataclass(eq=False)
class SplitHeads(Operation):
    """[T, (H + 2 * Hkv) * D] -> query [T, H, D], key and value [T, Hkv, D]."""

    owns = False
    views = True

    num_heads: int
    head_size: int


@dataclass(eq=False)
class PerHead(Operation):
    """[T, H * D] -> [T, H, D]."""

    owns = False
    views = True

    num_heads: int


@dataclass(eq=False)
class Split(Operation):
    """[T, n] -> [T, size] for each of the sizes, which add up to n."""

    owns = False
    views = True

    sizes: tuple[int, ...]


@dataclass(eq=False)
class Join(Operation):
    """[T, ...] each, side by side -> [T, n]."""


@dataclass(eq=False)
class Absorb(Operation):
    """Queries [T, H, rotary + plain] -> [T, H, rotary + latent]: what is not turned, brought to the latent space."""

    layer: AbsorbedLinear


@dataclass(eq=False)
class Expand(Operation):
    """Weighted sums of latent vectors [T, H * latent] -> of values [T, H * D]."""

    row_wise = False
    """It is, but then rows would be selected between it and attention, which may give sums of values at once."""

    layer: AbsorbedLinear


@dataclass(eq=False)
class Attend(Operation):
    """Query [T, H, D], key and value [T, Hkv, D], which go to the cache -> [T, H * D]. Of the query alone where the
    layer reads another one's cache."""

    owns = False
    row_wise = False

    layer: Attention


@dataclass(eq=False)
class Head(Operation):
    """[L, E] -> [L, V] float32 logits, the same on every rank."""

    layer: OutputHead


@dataclass(eq=False)
class SoftCap(Operation):
    """limit * tanh(x / limit)."""

    limit: float


@dataclass(eq=False)
class Select(Operation):
    """[T, ...], rows -> [L, ...]: the rows that are asked for, or all."""

    owns = False
    views = True


@dataclass(eq=False)
class Keep(Operation):
    """A copy of [T, E], for who asks what is computed on the way."""


@dataclass(eq=False)
class Call(Operation):
    """Any function of tensors, or module of torch, that gives one tensor."""

    owns = False
    views = True

    function: Callable[..., Tensor]
    row_wise: bool = False


@runtime_checkable
class Layer(Protocol):
    """A layer of a model that says what it computes as operations."""

    def operations(self, net: "Network", x: Value) -> Value:
        """Add the layer's operations on x, [T, E]; what they give, [T, E]."""


class LayerInputs:
    """What the layers of a network read, of which some may be kept: given beside the result, of all rows."""

    def __init__(self, network: "Network") -> None:
        self.layers: tuple[int, ...] = ()
        """Those that are kept."""
        self.values: tuple[Value, ...] = ()
        """[T, E] for each of them."""
        self._network = network
        self._places: dict[int, tuple[Value, int]] = {}
        """Layer -> what it reads, and its first operation."""

    @property
    def known(self) -> list[int]:
        """The layers that may be kept, ascending."""
        return sorted(self._places)

    def mark(self, index: int, x: Value) -> None:
        """The operations that follow are those of a layer, and x, [T, E], is what it reads. One more than there are
        layers stands for what the last one gives."""
        self._places[index] = x, len(self._network.operations)

    def keep(self, layers: Sequence[int]) -> None:
        """Keep known ones, in this order. Once."""
        copies = {index: Value(self._network) for index in layers}
        # Behind a layer's first operation, which is mostly a norm: it is one kernel with the sum before it.
        for index in sorted(copies, key=lambda index: self._places[index][1], reverse=True):
            x, place = self._places[index]
            self._network.operations.insert(place + 1, Keep((x,), (copies[index],)))
        self.layers = tuple(layers)
        self.values = tuple(copies[index] for index in layers)


class Network:
    """Operations in the order in which they were added, which is one in which they can run."""

    def __init__(self, rotaries: Mapping[str, Rotary] = NO_ROTARIES) -> None:
        """`rotaries`: by the name that `rotary` is given."""
        self.operations: list[Operation] = []
        self.inputs = Value(self)
        """[T] int64 token ids, or [T, E] from the pipeline stage before; of logits, [L, E]."""
        self.positions = Value(self)
        """[T] int64."""
        self.rows = Value(self)
        """[L] int64, ascending: the rows of the result that are asked for; None: all."""
        self.result = self.inputs
        """[T, E], or [L, V]."""
        self.layer_inputs = LayerInputs(self)
        """Of which some may be given beside the result."""
        self._rotaries = rotaries
        self._tables: dict[str, tuple[Value, Value]] = {}

    def embed(self, tokens: Value, layer: Embeds, *more: Value) -> Value:
        """[T] token ids, and what else the layer reads, -> [T, E]."""
        return self._one(Embed, (tokens, *more), layer)

    def embed_positions(self, layer: PositionEmbedding) -> Value:
        """This step's positions -> [T, E]."""
        return self._one(EmbedPositions, (self.positions,), layer)

    def norm(self, x: Value, layer: AnyNorm) -> Value:
        """RMSNorm or LayerNorm over the last dimension of [T, E] or [T, H, D]."""
        return self._one(Norm, (x,), layer)

    def linear(self, x: Value, layer: Linear) -> Value:
        """[T, in] -> [T, out], summed over the ranks that share the layer's inputs."""
        out = self._one(Multiply, (x,), layer)
        return out if layer.sums_over is None else self._one(AllReduce, (out,), layer)

    def gated(self, x: Value, activation: str, *, apart: bool = False) -> Value:
        """[T, 2 * I] -> [T, I]: act(first half) * second half; as in `activated`, which is slower but for silu and
        gelu_tanh. `apart`: no linear layer is to include it."""
        return self._one(AnyGate if apart or activation not in GATES else Gate, (x,), activation)

    def activated(self, x: Value, activation: str) -> Value:
        """act of each element; silu, gelu, gelu_tanh, relu, or relu2: the square of relu."""
        return self._one(Activate, (x,), activation)

    def experts(self, x: Value, router: Router, layer: Experts, routed_by: Value | None = None) -> Value:
        """[T, E] -> [T, E]: the weighted sum of each token's experts, which several ranks may hold. `routed_by`: what
        the router reads, [T, E], where that is not x."""
        chosen = Value(self)
        weights = Value(self)
        self.operations.append(Route((x if routed_by is None else routed_by,), (chosen, weights), router))
        routed = x, chosen, weights
        if layer.exchange is not None:
            gathered = Value(self), Value(self), Value(self)
            self.operations.append(GatherTokens(routed, gathered, layer.exchange))
            return self._one(ReturnTokens, (self._one(ApplyExperts, gathered, layer),), layer.exchange)
        out = self._one(ApplyExperts, routed, layer)
        return out if layer.sums_over is None else self._one(AllReduce, (out,), layer)

    def add(self, first: Value, second: Value) -> Value:
        """The sum of two values of one shape."""
        return self._one(Add, (first, second))

    def scaled(self, x: Value, factor: float | Callable[[], Tensor] | None) -> Value:
        """x times a factor, or a number, [1], that is there once weights are loaded; x itself where there is none."""
        if callable(factor):
            return self._one(ScaleLearnt, (x,), factor)
        return x if factor is None or factor == 1.0 else self._one(Scale, (x,), factor)

    def heads(self, qkv: Value, num_heads: int, head_size: int) -> tuple[Value, Value, Value]:
        """[T, (H + 2 * Hkv) * D] -> query [T, H, D], key and value [T, Hkv, D]."""
        query, key, value = Value(self), Value(self), Value(self)
        self.operations.append(SplitHeads((qkv,), (query, key, value), num_heads, head_size))
        return query, key, value

    def per_head(self, x: Value, num_heads: int) -> Value:
        """[T, H * D] -> [T, H, D]."""
        return self._one(PerHead, (x,), num_heads)

    def split(self, x: Value, *sizes: int) -> tuple[Value, ...]:
        """[T, n] -> [T, size] for each of the sizes, which add up to n."""
        parts = tuple(Value(self) for _ in sizes)
        self.operations.append(Split((x,), parts, sizes))
        return parts

    def join(self, *parts: Value) -> Value:
        """[T, ...] each, side by side -> [T, n]."""
        return self._one(Join, parts)

    def absorb(self, query: Value, layer: AbsorbedLinear) -> Value:
        """Queries [T, H, rotary + plain] -> [T, H, rotary + latent], for latent vectors in the place of keys."""
        return self._one(Absorb, (query,), layer)

    def expand(self, attended: Value, layer: AbsorbedLinear) -> Value:
        """Weighted sums of latent vectors [T, H * latent] -> of values [T, H * D]."""
        return self._one(Expand, (attended,), layer)

    def rotary(self, x: Value, kind: str) -> Value:
        """Rotary embedding of [T, H, D], by the tables of this name."""
        return self._one(Rotate, (x, *self.cos_sin(kind)), self._rotaries[kind])

    def attend(self, query: Value, key: Value, value: Value, layer: Attention) -> Value:
        """[T, H, D], twice [T, Hkv, D] -> [T, H * D]; keys and values go to the layer's cache first."""
        return self._one(Attend, (query, key, value), layer)

    def attend_shared(self, query: Value, layer: Attention) -> Value:
        """[T, H, D] -> [T, H * D], of the cache of another layer, which has run: `layer` has a `kv_owner`."""
        return self._one(Attend, (query,), layer)

    def head(self, x: Value, layer: OutputHead) -> Value:
        """[L, E] -> [L, V] float32 logits, the same on every rank."""
        return self._one(Head, (x,), layer)

    def soft_cap(self, x: Value, limit: float | None) -> Value:
        """limit * tanh(x / limit); x itself where there is no limit."""
        return x if limit is None else self._one(SoftCap, (x,), limit)

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
