"""Token embedding and output head, each rank with its part of the vocabulary; they may share one weight. Embedding of
positions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagemill.model.distributed.split import padded_split
from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.rows import rows_at
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.weight_reader import WeightReader
from pagemill.model.loading.quantized_tensor import QuantizedTensor, with_rows
from pagemill.model.loading.stored import LayerTensor, WeightPart
from pagemill.model.quantization.interface import LinearWeight, Role
from pagemill.utils.math import ceil_div


class Embedding(nn.Module):
    """[T] token ids -> [T, E] on every rank: each looks up the rows that it has, and the ranks add up.

    A tied output head shares the weight, in its computing form where that gives rows."""

    def __init__(self, num_embeddings: int, size: int, *, ctx: LayerContext, scale: float | None = None) -> None:
        super().__init__()
        self.name = ctx.name
        self.size = size
        self._dtype = ctx.dtype
        self.scale = None if scale is None else torch.tensor(scale, dtype=ctx.dtype)
        self.weight: Tensor | LinearWeight | None = None
        self._group = ctx.groups.tp
        self._rows = padded_split(num_embeddings, self._group.rank, self._group.size)
        self._num_rows = ceil_div(num_embeddings, self._group.size)
        part = WeightPart((num_embeddings, size), self._rows, range(size))
        self._reader = WeightReader(ctx, [part], Role.EMBEDDING)

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        """Every tensor of a checkpoint that belongs to the layer."""
        return self._reader.tensors(0)

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        """Take this rank's part of a checkpoint tensor."""
        weight = self._reader.take(kind, shard, tensor)
        if weight is not None:
            weight = with_rows(weight, lambda rows: _padded(rows, self._num_rows))
            self.weight = self._held(weight)

    def _held(self, weight: Tensor | QuantizedTensor) -> Tensor | LinearWeight:
        if not isinstance(weight, QuantizedTensor):
            return weight
        made = self._reader.held.prepare(weight)
        return made if made.gives_rows else weight.dequantized(self._dtype)

    def native(self) -> PackedLinear | Tensor | None:
        """The weight as native code takes it, packed or [V, E] bfloat16; None when there is no such form."""
        if self._group.size > 1 or self.weight is None:
            return None
        if isinstance(self.weight, LinearWeight):
            return self.weight.native(None)
        plain = self.weight.dtype == torch.bfloat16 and self.weight.is_contiguous()
        return self.weight if plain else None

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self.unscaled(token_ids)
        return rows if self.scale is None else rows * self.scale

    def unscaled(self, token_ids: Tensor) -> Tensor:
        """[T] token ids -> [T, E], the rows of the weight."""
        if self._group.size == 1:
            return self._rows_of(token_ids)
        local = token_ids - self._rows.start
        others = (token_ids < self._rows.start) | (token_ids >= self._rows.stop)
        rows = self._rows_of(local.masked_fill_(others, 0))
        return self._group.all_reduce(rows.masked_fill_(others.unsqueeze(1), 0))

    def _rows_of(self, indices: Tensor) -> Tensor:
        if isinstance(self.weight, LinearWeight):
            return self.weight.rows(indices)
        return rows_at(self.weight, indices)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """[T] int64 token ids -> the same, but 0 for those that a smaller table has no row of."""

    count: int
    """Rows of the table."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        return torch.where(token_ids < self.count, token_ids, 0)


class PositionEmbedding(nn.Module):
    """[T] positions -> [T, E]: a learnt vector for each, all of them on every rank."""

    def __init__(self, num_positions: int, size: int, *, ctx: LayerContext, first: int = 0) -> None:
        """`first`: the row of the checkpoint's table that is position 0."""
        super().__init__()
        self.weight = torch.empty(0)
        self._dtype = ctx.dtype
        self._shape = (first + num_positions, size)
        self._first = first

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """Every tensor of a checkpoint that belongs to the layer."""
        return (LayerTensor.whole("weight", self._shape),)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take the checkpoint tensor."""
        self.weight = tensor[self._first :].to(self._dtype)

    def forward(self, positions: Tensor) -> Tensor:
        return functional.embedding(positions, self.weight)


@dataclass(frozen=True, slots=True)
class EmbeddingSum:
    """Embeddings of a token, its position and its type, added up in this order: ([T] token ids, [T] positions) ->
    [T, E]."""

    tokens: Embedding
    positions: PositionEmbedding
    types: PositionEmbedding
    types_of_step: Callable[[], Tensor | None]
    """[T] int64 of the step; None: all are 0."""

    @property
    def size(self) -> int:
        """Elements of a token's embedding."""
        return self.tokens.size

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        types = self.types_of_step()
        weight = self.types.weight
        x: Tensor = self.tokens(token_ids) + self.positions(positions)
        return x + (weight[0] if types is None else weight[types])

    def native(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The three tables as native code takes them, [n, E] bfloat16; None when there is no such form."""
        tokens = self.tokens.native()
        if not isinstance(tokens, Tensor) or self.tokens.scale is not None:
            return None
        tables = (tokens, self.positions.weight, self.types.weight)
        plain = all(table.dtype == torch.bfloat16 and table.is_contiguous() for table in tables)
        return tables if plain else None


class OutputHead(Linear):
    """[L, E] -> [L, V] float32 on every rank: each computes those of its part of the vocabulary, all are gathered."""

    def __init__(
        self,
        size: int,
        vocab_size: int,
        *,
        ctx: LayerContext,
        embedding: LayerContext | None = None,
        bias: bool = False,
    ) -> None:
        """`embedding`: that of the embedding whose weight is loaded here too."""
        self._group = ctx.groups.tp
        self._vocab_size = vocab_size
        self._embedding = embedding
        rows = padded_split(vocab_size, self._group.rank, self._group.size)
        super().__init__(size, (vocab_size,), bias=bias, ctx=ctx, rows=[rows])

    def _make_reader(self, parts: Sequence[WeightPart]) -> WeightReader:
        if self._embedding is None:
            return WeightReader(self._ctx, parts, Role.HEAD)
        return WeightReader(self._embedding, parts, Role.EMBEDDING, held=self._ctx.method(0, Role.HEAD))

    def arrange(self, rows: Tensor, shard: int) -> Tensor:
        return _padded(rows, ceil_div(self._vocab_size, self._group.size))

    def share(self, embedding: Embedding) -> None:
        """Take the embedding's weight; of the two forms one is kept, where it serves both."""
        if isinstance(embedding.weight, Tensor):
            self.take([embedding.weight])
        else:
            self.weight = embedding.weight
        if self.weight is not None and self.weight.gives_rows:
            embedding.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        logits = self.weight.logits(x)  # type: ignore[union-attr]
        if self.bias is not None:
            logits = logits + self.bias
        if self._group.size == 1:
            return logits
        return self._group.all_gather(logits)[:, : self._vocab_size]


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    """A rank's rows, with zeros where its part, at the end, is shorter than the others'."""
    missing = num_rows - len(rows)
    return functional.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows
