"""Token embedding and output head, each rank with its part of the vocabulary. They may share one weight."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagemill.errors import ModelError
from pagemill.model.distributed.split import padded_split
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear
from pagemill.model.loading.part import Part
from pagemill.utils.math import ceil_div


class Embedding(nn.Module):
    """[T] token ids -> [T, E] on every rank: each looks up the rows that it has, and the ranks add up."""

    shards = (0,)

    def __init__(self, num_embeddings: int, size: int, *, ctx: LayerContext, scale: float | None = None) -> None:
        super().__init__()
        self.name = ctx.name
        self.shape = (num_embeddings, size)
        self.dtype = ctx.dtype
        self.scale = None if scale is None else torch.tensor(scale, dtype=ctx.dtype)
        self.weight: Tensor | None = None
        self._group = ctx.groups.tp
        self._rows = padded_split(num_embeddings, self._group.rank, self._group.size)

    def part(self, kind: str, shard: int, shape: tuple[int, ...]) -> Part:
        """What this rank reads of the checkpoint tensor. Raises ModelError on a wrong shape or kind."""
        if kind != "weight" or tuple(shape) != self.shape:
            raise ModelError(f"{self.name}.{kind} has shape {tuple(shape)}, expected {self.shape}")
        return Part(0, self._rows.start, self._rows.stop)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take this rank's part of the checkpoint tensor."""
        self.weight = _padded(tensor.to(self.dtype), self.shape[0], self._group.size)

    def expected(self) -> tuple[str, ...]:
        """Kinds of tensors that the layer has."""
        return ("weight",)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._look_up(token_ids)
        return rows if self.scale is None else rows * self.scale

    def _look_up(self, token_ids: Tensor) -> Tensor:
        weight: Tensor = self.weight  # type: ignore[assignment]
        if self._group.size == 1:
            return functional.embedding(token_ids, weight)
        local = token_ids - self._rows.start
        others = (token_ids < self._rows.start) | (token_ids >= self._rows.stop)
        rows = functional.embedding(local.masked_fill_(others, 0), weight)
        return self._group.all_reduce(rows.masked_fill_(others.unsqueeze(1), 0))


class OutputHead(Linear):
    """[L, E] -> [L, V] float32 on every rank: each computes those of its part of the vocabulary, all are gathered."""

    def __init__(self, size: int, vocab_size: int, *, ctx: LayerContext) -> None:
        self._group = ctx.groups.tp
        self._vocab_size = vocab_size
        rows = padded_split(vocab_size, self._group.rank, self._group.size)
        super().__init__(size, (vocab_size,), bias=False, ctx=ctx, rows=[rows])

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        super().load(kind, shard, _padded(tensor, self._vocab_size, self._group.size))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.weight.logits(x)  # type: ignore[union-attr]
        if self._group.size == 1:
            return logits
        return self._group.all_gather(logits)[:, : self._vocab_size]


def _padded(rows: Tensor, num_rows: int, num_parts: int) -> Tensor:
    """A part of `num_rows` rows, with zeros where parts at the end are shorter than the others."""
    missing = ceil_div(num_rows, num_parts) - len(rows)
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
