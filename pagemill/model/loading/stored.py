"""`StoredTensor`: what a checkpoint holds of a layer under one name, and `LayerTensor`: what a rank reads of it.

Knows neither files nor layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagemill.model.loading.part import Part, whole
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.utils.math import ceil_div

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a stored tensor that runs along the rows (outputs) or the columns (inputs) of the weight."""

    dim: int
    per_index: int = 1
    """Rows or columns of the weight for each index: 8 where eight 4-bit integers share 32 bits, 128 for the scales of
    groups of 128."""

    def part(self, wanted: range, as_stored: bool) -> Part:
        """The indices that cover some rows or columns."""
        return Part(self.dim, wanted.start // self.per_index, ceil_div(wanted.stop, self.per_index), as_stored)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Which part of a weight [out, in] a rank has."""

    shape: tuple[int, int]
    """Of the whole weight."""
    rows: range
    columns: range
    elsewhere: bool = False
    """Whether it is another rank's altogether."""

    @property
    def splits_columns(self) -> bool:
        """Whether the weight is split by columns; otherwise it is split by rows, or not at all."""
        return len(self.columns) < self.shape[1]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a layer in a checkpoint."""

    kind: str
    """Its name, after the layer's: weight, bias, weight_scale."""
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    """Types that it may be of."""
    rows: Axis | None = None
    """Where the weight's rows are; None: every rank with some rows reads all of the tensor."""
    columns: Axis | None = None
    """The same for its columns."""
    values: range | None = None
    """What its integers must be in; None: anything. For small tensors: it is looked up."""
    unused: bool = False
    """Whether it may be there, and is not needed."""
    zeros: bool = False
    """Whether it is `unused`, and zeros: then it is read, to see that."""
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """In which the same numbers may be stored, too."""
    other_kinds: tuple[str, ...] = ()
    """Names that it may have instead."""
    max_length: int | None = None
    """Of a vector whose length is not known; `shape` says nothing then."""
    usual: range | bytes | None = None
    """What random weights have in it, where not everything that is allowed makes sense: integers, or all bytes."""

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a file may have that shape."""
        if self.max_length is not None:
            return len(shape) == 1 and shape[0] <= self.max_length
        return self.unused or shape in (self.shape, *self.other_shapes)

    def part_for(self, part: WeightPart, as_stored: bool = False) -> Part | None:
        """What is read of it for a part of the weight; None for another rank's. `as_stored`: as in `Part`."""
        if part.elsewhere:
            return None
        axis, wanted = (self.columns, part.columns) if part.splits_columns else (self.rows, part.rows)
        return whole(self.kind, self.shape) if axis is None else axis.part(wanted, as_stored)


@dataclass(frozen=True, slots=True)
class FloatForm:
    """A weight as floats, which a checkpoint may hold in place of what a format stores it in."""

    stored: StoredTensor
    part: Part | None
    """What this rank reads of it; None: nothing."""
    kinds: tuple[str, ...]
    """What the format stores it in, but for zeros, such as needless biases, which may be there in any case."""


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """A tensor that a layer takes."""

    stored: StoredTensor
    shard: int = 0
    """Which of the checkpoint's layers that this one is stacked from it belongs to."""
    part: Part | None = None
    """What this rank reads of it; None: nothing."""
    floats: FloatForm | None = None
    """What may be there in place of it and the other tensors of its weight."""

    @classmethod
    def whole(cls, kind: str, shape: tuple[int, ...]) -> "LayerTensor":
        """A tensor of floats that every rank reads all of."""
        return cls(StoredTensor(kind, shape), 0, whole(kind, shape))


class LoadableLayer(Protocol):
    """A layer that takes tensors of a checkpoint."""

    def checkpoint_tensors(self) -> Iterable[LayerTensor]:
        """Every tensor of a checkpoint that belongs to the layer."""

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        """Take this rank's part of one of them. Raises ModelError for values that cannot be."""
