"""`WeightReader`: collects what a checkpoint stores of the weights of one layer. Knows no format and no layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.nibble_weight import StoredIntegers
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.part import Part
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import FLOATS, Axis, FloatForm, LayerTensor, StoredTensor, WeightPart
from pagemill.model.quantization.interface import QuantMethod, Role, ShapeError


@dataclass(frozen=True, slots=True)
class _Declared:
    """What a checkpoint may hold of one weight."""

    stored: tuple[tuple[StoredTensor, Part | None], ...]
    """The tensors of the method, and which part of each is read (None: another rank's)."""
    floats: FloatForm | None
    """What may be there instead; None where the method's own tensors cannot be told from it."""


class WeightReader:
    """One weight for each shard, this rank's part of it; each is decoded when the last of its tensors has arrived.

    A checkpoint decides which layers are in its format: one that has a weight as floats is read as it is, whether or
    not its configuration names the layer as an exception. Some name routers so, and others rely on them being none of
    the layers that are quantized.
    """

    def __init__(
        self,
        ctx: LayerContext,
        parts: Sequence[WeightPart],
        role: Role = Role.LINEAR,
        *,
        held: QuantMethod | None = None,
    ) -> None:
        """`held`: the method whose form the weights will take; by default that in which the first is stored."""
        self.num_shards = len(parts)
        self._dtype: torch.dtype = ctx.dtype
        self._methods = [ctx.method(shard, role) for shard in range(len(parts))]
        self.held = held or self._methods[0]
        self._parts = parts
        self._known: dict[tuple[int, int], _Declared] = {}
        """By method and part, which live as long as this."""
        self._arrived: dict[int, dict[str, Tensor | QuantizedTensor]] = {}

    def tensors(self, shard: int) -> Iterator[LayerTensor]:
        """What a checkpoint holds of one weight: the tensors of its method, or the weight as floats."""
        declared = self._declared(shard)
        for stored, part in declared.stored:
            yield LayerTensor(stored, shard, part, declared.floats)

    def take(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor | None:
        """The weight, when this is the last of its tensors. Raises ModelError for values that cannot be."""
        declared = self._declared(shard)
        if declared.floats is not None and isinstance(tensor, Tensor) and _is_of(declared.floats.stored, kind, tensor):
            return tensor.to(self._dtype)
        arrived = self._arrived.setdefault(shard, {})
        arrived[kind] = tensor
        if any(not stored.unused and stored.kind not in arrived for stored, _ in declared.stored):
            return None
        weight = self._methods[shard].decode(self._arrived.pop(shard), self._parts[shard], self._dtype)
        if isinstance(weight, PackedWeight | StoredIntegers) and not self.held.takes_packed:
            return weight.dequantized(self._dtype)
        return weight

    def _declared(self, shard: int) -> _Declared:
        """Experts share few methods and parts."""
        method = self._methods[shard]
        part = self._parts[shard]
        known = self._known.get((id(method), id(part)))
        if known is None:
            known = self._declare(method, part)
            self._known[id(method), id(part)] = known
        return known

    def _declare(self, method: QuantMethod, part: WeightPart) -> _Declared:
        floats = StoredTensor("weight", part.shape, rows=Axis(0), columns=Axis(1))
        part_of_floats = floats.part_for(part)
        try:
            stored = method.tensors(part.shape)
        except ShapeError:  # no checkpoint has it quantized
            return _Declared(((floats, part_of_floats),), FloatForm(floats, part_of_floats, ()))
        as_stored = self.held.takes_blocks
        of_method = tuple((one, one.part_for(part, as_stored)) for one in stored)
        if any(_is_alike(one, floats) for one in stored):
            return _Declared(of_method, None)
        return _Declared(
            of_method, FloatForm(floats, part_of_floats, tuple(one.kind for one in stored if not one.zeros))
        )


def _is_of(floats: StoredTensor, kind: str, tensor: Tensor) -> bool:
    return kind == floats.kind and tensor.dtype in floats.dtypes


def _is_alike(stored: StoredTensor, floats: StoredTensor) -> bool:
    """Whether a tensor of that name and type may be either: then the method reads floats itself, in its own shape."""
    return stored.kind == floats.kind and not set(stored.dtypes).isdisjoint(FLOATS)
