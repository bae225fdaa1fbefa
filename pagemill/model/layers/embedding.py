"""Token embedding and output head, each rank with its part of the vocabulary. They may share one weight."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagemill.errors import ModelError
from pagemill.model.distributed.split import padded_split
from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.loading.part import Part
from pagemill.model.quantization.interface import LinearWeight
from pagemill.utils.math import ceil_div


class Embedding(nn.Module):
    """[T] token ids -> [T, E] on every rank: each looks up the rows that it has, and the ranks add up.

    A tied output head shares the weight, in its computing form where that gives rows."""

    shards = (0,)

    def __init__(self, num_embeddings: int, size: int, *, ctx: LayerContext, scale: float | None = None) -> None:
        super().__init__()
        self.name = ctx.name
        self.shape = (num_embeddings, size)
        self.dtype = ctx.dtype
        self.scale = None if scale is None else torch.tensor(scale, dtype=ctx.dtype)
        self.weight: Tensor | LinearWeight | None = None
        self._quant = ctx.quant
        self._group = ctx.groups.tp
        self._rows = padded_split(num_embeddings, self._group.rank, self._group.size)

    def part(self, kind: str, shard: int, shape: tuple[int, ...]) -> Part:
        """What this rank reads of the checkpoint tensor. Raises ModelError on a wrong shape or kind."""
        if kind != "weight" or tuple(shape) != self.shape:
            raise ModelError(f"{self.name}.{kind} has shape {tuple(shape)}, expected {self.shape}")
        return Part(0, self._rows.start, self._rows.stop, self._quant.takes_blocks)

    def load(self, kind: str, shard: int, tensor: Tensor | BlockTensor) -> None:
        """Take this rank's part of the checkpoint tensor."""
        padded = _padded(tensor, self.shape[0], self._group.size)
        self.weight = self._quant.prepare(padded) if isinstance(padded, BlockTensor) else padded.to(self.dtype)

    def expected(self) -> tuple[str, ...]:
        """Kinds of tensors that the layer has."""
        return ("weight",)

    def native(self) -> PackedLinear | Tensor | None:
        """The weight as native code takes it, packed or [V, E] bfloat16; None when there is no such form."""
        if self._group.size > 1 or self.weight is None:
            return None
        if isinstance(self.weight, LinearWeight):
            return self.weight.native(None)
        plain = self.weight.dtype == torch.bfloat16 and self.weight.is_contiguous()
        return self.weight if plain else None

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._look_up(token_ids)
        return rows if self.scale is None else rows * self.scale

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._rows_of(token_ids)
        local = token_ids - self._rows.start
        others = (token_ids < self._rows.start) | (token_ids >= self._rows.stop)
        rows = self._rows_of(local.masked_fill_(others, 0))
        return self._group.all_reduce(rows.masked_fill_(others.unsqueeze(1), 0))

    def _rows_of(self, indices: Tensor) -> Tensor:
        if isinstance(self.weight, LinearWeight):
            return self.weight.rows(indices)
        return functional.embedding(indices, self.weight)  # type: ignore[arg-type]


class OutputHead(Linear):
    """[L, E] -> [L, V] float32 on every rank: each computes those of its part of the vocabulary, all are gathered."""

    def __init__(self, size: int, vocab_size: int, *, ctx: LayerContext) -> None:
        self._group = ctx.groups.tp
        self._vocab_size = vocab_size
        rows = padded_split(vocab_size, self._group.rank, self._group.size)
        super().__init__(size, (vocab_size,), bias=False, ctx=ctx, rows=[rows])

    def load(self, kind: str, shard: int, tensor: Tensor | BlockTensor) -> None:
        super().load(kind, shard, _padded(tensor, self._vocab_size, self._group.size))

    def take(self, weight: Tensor | BlockTensor) -> None:
        self.weight = self._ctx.quant.prepare_head(weight)

    def share(self, embedding: Embedding) -> None:
        """Take the embedding's weight; of the two forms one is kept, where it serves both."""
        if isinstance(embedding.weight, Tensor):
            self.take(embedding.weight)
        else:
            self.weight = embedding.weight
        if self.weight is not None and self.weight.gives_rows:
            embedding.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        logits = self.weight.logits(x)  # type: ignore[union-attr]
        if self._group.size == 1:
            return logits
        return self._group.all_gather(logits)[:, : self._vocab_size]


def _padded(rows: Tensor | BlockTensor, num_rows: int, num_parts: int) -> Tensor | BlockTensor:
    """A part of `num_rows` rows, with zeros where parts at the end are shorter than the others."""
    part = ceil_div(num_rows, num_parts)
    if isinstance(rows, BlockTensor):
        return rows.padded(part)
    return functional.pad(rows, (0, 0, 0, part - len(rows))) if part > len(rows) else rows
