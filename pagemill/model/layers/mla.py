"""Linear layers of multi-head latent attention (DeepSeek-V2, 2024): the rotary part of each vector comes first, in
halves instead of pairs, so that the usual rotary kernels turn it. Knows neither cache nor attention.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagemill.model.distributed.split import even_split
from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.native_heads import HeadParts, NativeHeads, packs_heads
from pagemill.model.kernels.weight_memory import WeightMemory
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import ColumnLinear, Linear
from pagemill.model.layers.weight_reader import WeightReader
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.loading.stored import LayerTensor, WeightPart
from pagemill.model.quantization.unquantized import Unquantized


def rotary_first(rows: Tensor, vector_size: int, rotary_size: int, interleaved: bool) -> Tensor:
    """The rows [n * vector_size, ...] of a weight, or a bias, with those of the rotary part of each of n vectors, its
    last, put first; pairs of neighbours become pairs of halves. Scores stay as they are when query and key change
    alike."""
    vectors = rows.reshape(-1, vector_size, *rows.shape[1:])
    plain = vectors[:, :-rotary_size]
    turned = vectors[:, -rotary_size:]
    if interleaved:
        turned = torch.cat([turned[:, 0::2], turned[:, 1::2]], dim=1)
    return torch.cat([turned, plain], dim=1).reshape(rows.shape)


class QueryLinear(ColumnLinear):
    """[T, in] -> [T, heads of this rank * (rotary + plain)]."""

    def __init__(
        self, in_size: int, num_heads: int, sizes: tuple[int, int], *, interleaved: bool, ctx: LayerContext
    ) -> None:
        """`sizes`: of the plain and the rotary part of a head. Raises ConfigError when heads cannot be dealt out."""
        plain, self._rotary = sizes
        self._vector = plain + self._rotary
        self._interleaved = interleaved
        even_split(num_heads, ctx.groups.tp.rank, ctx.groups.tp.size, "num_attention_heads")
        super().__init__(in_size, (num_heads * self._vector,), bias=False, ctx=ctx, what="size of the query heads")

    def arrange(self, rows: Tensor, shard: int) -> Tensor:
        return rotary_first(rows, self._vector, self._rotary, self._interleaved)


class LatentLinear(Linear):
    """[T, in] -> [T, rotary + latent] on every rank: what is kept of a token, its latent part not yet normed."""

    def __init__(
        self, in_size: int, sizes: tuple[int, int], *, interleaved: bool, bias: bool, ctx: LayerContext
    ) -> None:
        """`sizes`: of the latent and the rotary part."""
        self._rotary = sizes[1]
        self._interleaved = interleaved
        super().__init__(in_size, (sum(sizes),), bias=bias, ctx=ctx)

    def arrange(self, rows: Tensor, shard: int) -> Tensor:
        return rotary_first(rows, len(rows), self._rotary, self._interleaved)


class AbsorbedHeads(NamedTuple):
    """An `AbsorbedLinear` as native code takes it."""

    absorb: NativeHeads
    """The plain part of a query -> a latent vector."""
    expand: NativeHeads
    """A latent vector -> a value."""


class AbsorbedLinear(nn.Module):
    """What makes keys and values of latent vectors, applied to queries and results instead, head by head. Never
    quantized: it is small, and applied twice. On a CPU in bfloat16 it is held twice, for native code as well."""

    def __init__(self, latent_size: int, num_heads: int, sizes: tuple[int, int], *, ctx: LayerContext) -> None:
        """`sizes`: of the plain part of a key and of a value. Raises ConfigError when heads cannot be dealt out."""
        super().__init__()
        self.name = ctx.name
        self.sizes = sizes
        self._dtype = ctx.dtype
        heads = even_split(num_heads, ctx.groups.tp.rank, ctx.groups.tp.size, "num_attention_heads")
        rows = range(heads.start * sum(sizes), heads.stop * sum(sizes))
        part = WeightPart((num_heads * sum(sizes), latent_size), rows, range(latent_size))
        self._reader = WeightReader(ctx, [part], held=Unquantized())
        self.key = torch.empty(0)
        """[H, plain, latent]."""
        self.value = torch.empty(0)
        """[H, latent, value]."""
        self._rows = torch.empty(0)
        """[H, plain + value, latent], on a GPU: both once more, for one product. Decoding is faster with each apart."""
        self._native: AbsorbedHeads | None = None

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return len(self.key)

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        """Every tensor of a checkpoint that belongs to the layer."""
        return self._reader.tensors(0)

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        """Take this rank's part of a checkpoint tensor."""
        weight = self._reader.take(kind, shard, tensor)
        if weight is None:
            return
        rows = floats(weight, self._dtype).contiguous()
        heads = rows.view(-1, sum(self.sizes), rows.shape[1])
        key = heads[:, : self.sizes[0]]
        value = heads[:, self.sizes[0] :]
        self.key = key.contiguous()
        self.value = value.transpose(1, 2).contiguous()
        if rows.is_cuda:
            self._rows = heads
        self._native = _packed(self.key.transpose(1, 2), heads[:, self.sizes[0] :])

    def native(self) -> AbsorbedHeads | None:
        """The form in which native code takes the layer; None when there is none."""
        return self._native

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [T, H, rotary + plain] -> [T, H, rotary + latent], for latent vectors in the place of keys."""
        turned = query.shape[2] - self.sizes[0]
        if self._native is not None and not torch.compiler.is_compiling():
            return _absorbed(query, turned, self._native, self.key.shape[2])
        latent = torch.bmm(query[..., turned:].transpose(0, 1), self.key).transpose(0, 1)
        return torch.cat([query[..., :turned], latent], dim=-1)

    def expand(self, latent: Tensor) -> Tensor:
        """Weighted sums of latent vectors [T, H * latent] -> those of values [T, H * value]."""
        if self._native is not None and not torch.compiler.is_compiling():
            return _expanded(latent, self._native, *self.value.shape[1:])
        heads = latent.view(len(latent), len(self.value), -1)
        return torch.bmm(heads.transpose(0, 1), self.value).transpose(0, 1).reshape(len(latent), -1)

    def make(self, kept: Tensor, expanded: Tensor, first_head: int) -> None:
        """kept [S, rotary + latent] -> expanded [S, heads, plain + value], contiguous: the plain parts of keys, and
        values, of so many heads from the first one on."""
        which = slice(first_head, first_head + expanded.shape[1])
        rows = self._rows[which] if len(self._rows) else torch.cat([self.key, self.value.transpose(1, 2)], 1)[which]
        torch.mm(kept[:, -rows.shape[2] :], rows.flatten(0, 1).t(), out=expanded.flatten(1))


def _packed(absorb: Tensor, expand: Tensor) -> AbsorbedHeads | None:
    """Of [H, latent, plain] and [H, value, latent]."""
    if not (packs_natively() and packs_heads(absorb) and packs_heads(expand)):
        return None
    memory = WeightMemory()
    return AbsorbedHeads(NativeHeads.of(absorb, memory), NativeHeads.of(expand, memory))


def _absorbed(query: Tensor, turned: int, native: AbsorbedHeads, latent: int) -> Tensor:
    count, num_heads, size = query.shape
    out = query.new_empty(count, num_heads, turned + latent)
    out[..., :turned] = query[..., :turned]
    placed = native.absorb.placed(HeadParts(size, turned), HeadParts(turned + latent, turned))
    placed.apply(query.contiguous(), out)
    return out


def _expanded(given: Tensor, native: AbsorbedHeads, latent: int, value: int) -> Tensor:
    out = given.new_empty(len(given), given.shape[1] // latent * value)
    native.expand.placed(HeadParts(latent, 0), HeadParts(value, 0)).apply(given.contiguous(), out)
    return out
