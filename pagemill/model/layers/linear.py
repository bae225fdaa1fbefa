"""Linear layers: one weight, possibly stacked from several checkpoint tensors. Knows nothing of how it is stored.

Over tensor-parallel ranks a weight is split by rows (its outputs) or by columns (its inputs); a column-parallel layer
followed by a row-parallel one exchanges data once (Shoeybi et al., "Megatron-LM", 2019).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from pagemill.model.distributed.group import Group
from pagemill.model.distributed.split import even_split, split_heads
from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.weight_reader import WeightReader
from pagemill.model.loading.part import Part
from pagemill.model.loading.quantized_tensor import QuantizedTensor, with_rows
from pagemill.model.loading.stored import LayerTensor, StoredTensor, WeightPart
from pagemill.model.quantization.interface import LinearWeight, Role

VALUE = 2
"""The last shard of a `QKVLinear`, after query and key."""


class Linear(nn.Module):
    """[T, in] -> [T, sum(out)]. `shards` are the output sizes of the checkpoint tensors that it is stacked from.

    `rows` are those of each shard that this rank holds, `columns` those of all; None: all of them. What a checkpoint
    stores of them arrives in any order through `load`; when the last one has, the weight takes its computing form and
    the loaded tensors are freed.
    """

    # torch's looks for parameters and modules, and here are none; a model sets thousands of attributes.
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def __init__(
        self,
        in_size: int,
        shards: tuple[int, ...],
        *,
        bias: bool,
        ctx: LayerContext,
        rows: Sequence[range] | None = None,
        columns: range | None = None,
    ) -> None:
        super().__init__()
        self.gate: str | None = None
        """The gated activation (silu, gelu_tanh) that comes after, which the weight may include: set before it is
        loaded."""
        self.sums_over: Group | None = None
        """The ranks whose results are to be summed, where the layer's inputs are split over several."""
        self.name = ctx.name
        self.in_size = in_size
        self.shards = shards
        self.has_bias = bias
        self.rows = tuple(rows or (range(size) for size in shards))
        self.num_columns = in_size if columns is None else len(columns)
        self._ctx = ctx
        self._reader = self._make_reader(
            [
                WeightPart((size, in_size), part, columns or range(in_size))
                for size, part in zip(shards, self.rows, strict=True)
            ]
        )
        self._weights: dict[int, Tensor | QuantizedTensor] = {}
        self._biases: dict[int, Tensor] = {}
        self.weight: LinearWeight | None = None
        self.bias: Tensor | None = None

    def _make_reader(self, parts: Sequence[WeightPart]) -> WeightReader:
        return WeightReader(self._ctx, parts)

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        """Every tensor of a checkpoint that may belong to the layer."""
        for shard, (size, rows) in enumerate(zip(self.shards, self.rows, strict=True)):
            yield from self._reader.tensors(shard)
            if self.has_bias:
                yield LayerTensor(StoredTensor("bias", (size,)), shard, Part(0, rows.start, rows.stop))

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        """Take this rank's part of one checkpoint tensor."""
        if kind == "bias" and isinstance(tensor, Tensor):
            self._biases[shard] = self.arrange(tensor.to(self._ctx.dtype), shard)
            if len(self._biases) == len(self.shards):
                self.bias = torch.cat([self._biases[index] for index in sorted(self._biases)])
                self._biases = {}
            return
        weight = self._reader.take(kind, shard, tensor)
        if weight is None:
            return
        self._weights[shard] = with_rows(weight, partial(self.arrange, shard=shard))
        if len(self._weights) == len(self.shards):
            self.take([self._weights[index] for index in sorted(self._weights)])
            self._weights = {}

    def arrange(self, rows: Tensor, shard: int) -> Tensor:
        """The rows of a shard's weight, or its bias, in the order in which they are held here."""
        return rows

    def take(self, parts: Sequence[Tensor | QuantizedTensor]) -> None:
        """Take the whole of this rank's weight: its parts, one under the other, in the model's type or as blocks."""
        gate = None if self.has_bias else self.gate
        self.weight = self._reader.held.prepare_stacked(parts, self._ctx.dtype, gate)

    @property
    def own_bias(self) -> Tensor | None:
        """What this rank adds: nothing before a sum over ranks."""
        return None if self.sums_over is not None else self.bias

    def native(self) -> PackedLinear | None:
        """The form in which native code takes the layer; None when there is none."""
        return None if self.weight is None else self.weight.native(self.own_bias)

    def forward(self, x: Tensor) -> Tensor:
        share = self.weight.apply(x, self.own_bias)  # type: ignore[union-attr]
        return share if self.sums_over is None else self.sum_up(share)

    def sum_up(self, share: Tensor) -> Tensor:
        """The sum of what the ranks of `sums_over` have computed, and the bias."""
        total = share if self.sums_over is None else self.sums_over.all_reduce(share)
        return total if self.bias is None else total.add_(self.bias)


class HeadLinear(Linear):
    """The same for what a quantized checkpoint takes for an output head."""

    def _make_reader(self, parts: Sequence[WeightPart]) -> WeightReader:
        return WeightReader(self._ctx, parts, Role.HEAD)


class ColumnLinear(Linear):
    """[T, in] on every rank -> [T, this rank's part of each of the outputs]."""

    def __init__(
        self,
        in_size: int,
        shards: tuple[int, ...],
        *,
        bias: bool,
        ctx: LayerContext,
        what: str,
    ) -> None:
        """`what`: the setting of the model that is split, for errors. Raises ConfigError when it cannot be split."""
        tp = ctx.groups.tp
        rows = [even_split(size, tp.rank, tp.size, what) for size in shards]
        super().__init__(in_size, shards, bias=bias, ctx=ctx, rows=rows)


class PickedLinear(Linear):
    """[T, in] -> [T, those of the outputs that are picked], of one weight of a checkpoint, which every rank reads."""

    def __init__(self, in_size: int, out_size: int, picked: Tensor, *, bias: bool, ctx: LayerContext) -> None:
        """`picked`: the outputs of this rank in the order in which they are held here."""
        self._picked = picked
        self._takes_all = torch.equal(picked, torch.arange(out_size, device=picked.device))
        super().__init__(in_size, (out_size,), bias=bias, ctx=ctx)

    def arrange(self, rows: Tensor, shard: int) -> Tensor:
        return rows if self._takes_all else rows[self._picked.to(rows.device)]


class JoinedColumnLinear(PickedLinear):
    """`ColumnLinear` of outputs that a checkpoint has in one weight, one part after the other."""

    def __init__(self, in_size: int, parts: tuple[int, ...], *, bias: bool, ctx: LayerContext, what: str) -> None:
        """`what`: the setting of the model that is split, for errors. Raises ConfigError when it cannot be split."""
        tp = ctx.groups.tp
        picked = []
        first = 0
        for size in parts:
            mine = even_split(size, tp.rank, tp.size, what)
            picked.append(torch.arange(first + mine.start, first + mine.stop))
            first += size
        super().__init__(in_size, first, torch.cat(picked), bias=bias, ctx=ctx)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """How a checkpoint has the heads of query, key and value."""

    head_size: int
    paired: int = 0
    """So many of a head's first elements, of query and key, are pairs of neighbours to rotary embedding; here they are
    pairs of halves. Scores stay as they are when query and key change alike."""
    joined: bool = False
    """Whether they are in one weight."""
    grouped: bool = False
    """Whether, there, the query heads of each key head come first, then that, then its value."""

    def order(self) -> Tensor:
        """[D]: a head's elements as they are held here, of those of the checkpoint."""
        order = torch.arange(self.head_size)
        pairs = order[: self.paired]
        return torch.cat([pairs[0::2], pairs[1::2], order[self.paired :]])

    def paired_rows(self, rows: Tensor) -> Tensor:
        """[heads * D, ...], each head in the order in which it is held here."""
        if not self.paired:
            return rows
        heads = rows.view(-1, self.head_size, *rows.shape[1:])
        return heads[:, self.order().to(rows.device)].reshape(rows.shape)


class QKVLinear(Linear):
    """[T, in] -> [T, query, key and value of this rank's heads]. Key and value heads are replicated when there are
    fewer of them than ranks. Raises ConfigError when the heads cannot be dealt out."""

    def __init__(
        self,
        in_size: int,
        num_heads: int,
        num_kv_heads: int,
        layout: HeadRows,
        *,
        bias: bool,
        ctx: LayerContext,
        num_parts: int = 3,
    ) -> None:
        """`num_parts`: so many of query, key and value; what a checkpoint has of the others is not read."""
        tp = ctx.groups.tp
        heads = split_heads(num_heads, num_kv_heads, tp.rank, tp.size)
        head_size = layout.head_size
        self.num_heads = len(heads.query)
        self.num_kv_heads = len(heads.kv)
        self._layout = layout
        rows = [range(part.start * head_size, part.stop * head_size) for part in (heads.query, heads.kv, heads.kv)]
        shards = (num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size)
        super().__init__(in_size, shards[:num_parts], bias=bias, ctx=ctx, rows=rows[:num_parts])
        self.sizes = tuple(len(part) for part in rows[:num_parts])
        """Of query, key and value in this rank's output."""

    def take(self, parts: Sequence[Tensor | QuantizedTensor]) -> None:
        self.weight = self._reader.held.prepare_qkv(parts, self._ctx.dtype)

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        yield from super().checkpoint_tensors()
        unused = [replace(tensor.stored, unused=True) for tensor in self._reader.tensors(0)]
        unused += [StoredTensor(kind, (), unused=True) for kind in ("weight", "bias")]
        for shard in range(len(self.shards), VALUE + 1):
            yield from (LayerTensor(stored, shard) for stored in unused)

    def arrange(self, rows: Tensor, shard: int) -> Tensor:
        return rows if shard == VALUE else self._layout.paired_rows(rows)


class JoinedQKVLinear(PickedLinear):
    """`QKVLinear` where a checkpoint has query, key and value in one weight. Raises ConfigError when the heads cannot
    be dealt out."""

    def __init__(
        self, in_size: int, num_heads: int, num_kv_heads: int, layout: HeadRows, *, bias: bool, ctx: LayerContext
    ) -> None:
        tp = ctx.groups.tp
        heads = split_heads(num_heads, num_kv_heads, tp.rank, tp.size)
        self.num_heads = len(heads.query)
        self.num_kv_heads = len(heads.kv)
        query, key, value = (torch.tensor(list(part)) for part in (heads.query, heads.kv, heads.kv))
        if layout.grouped:
            group = num_heads // num_kv_heads
            query = query // group * (group + 2) + query % group
            key = key * (group + 2) + group
            value = key + 1
        else:
            key = key + num_heads
            value = value + num_heads + num_kv_heads
        turned = torch.cat([query, key]).unsqueeze(1) * layout.head_size + layout.order()
        plain = value.unsqueeze(1) * layout.head_size + torch.arange(layout.head_size)
        picked = torch.cat([turned, plain]).flatten()
        super().__init__(in_size, (num_heads + 2 * num_kv_heads) * layout.head_size, picked, bias=bias, ctx=ctx)

    def take(self, parts: Sequence[Tensor | QuantizedTensor]) -> None:
        self.weight = self._reader.held.prepare_qkv(parts, self._ctx.dtype)


class RowLinear(Linear):
    """[T, this rank's part of the inputs] -> [T, out] on every rank: the sum of what the ranks compute."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, ctx: LayerContext, what: str) -> None:
        """`what`: the setting of the model that is split, for errors. Raises ConfigError when it cannot be."""
        tp = ctx.groups.tp
        columns = even_split(in_size, tp.rank, tp.size, what)
        super().__init__(in_size, (out_size,), bias=bias, ctx=ctx, columns=columns)
        self.sums_over = tp if tp.size > 1 else None
