"""`WeightReader`: collects what a checkpoint stores of the weights of one layer. Knows no format and no layer."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.nibble_weight import NibbleWeight
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.part import Part
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import LayerTensor, StoredTensor, WeightPart
from pagemill.model.quantization.interface import QuantMethod, Role

Declared = tuple[tuple[StoredTensor, Part | None], ...]


class WeightReader:
    """One weight for each shard, this rank's part of it; each is decoded when the last of its tensors has arrived."""

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
        self._known: dict[tuple[int, int], Declared] = {}
        """By method and part, which live as long as this."""
        self._arrived: dict[int, dict[str, Tensor | QuantizedTensor]] = {}

    def tensors(self, shard: int) -> Iterator[LayerTensor]:
        """What a checkpoint holds of one weight. Raises ModelError for a shape that its method does not store."""
        for stored, part in self._declared(shard):
            yield LayerTensor(stored, shard, part)

    def take(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor | None:
        """The weight, when this is the last of its tensors. Raises ModelError for values that cannot be."""
        arrived = self._arrived.setdefault(shard, {})
        arrived[kind] = tensor
        if any(not stored.unused and stored.kind not in arrived for stored, _ in self._declared(shard)):
            return None
        weight = self._methods[shard].decode(self._arrived.pop(shard), self._parts[shard], self._dtype)
        if isinstance(weight, PackedWeight | NibbleWeight) and not self.held.takes_packed:
            return weight.dequantized(self._dtype)
        return weight

    def _declared(self, shard: int) -> Declared:
        """What the method stores, and what is read of it. Experts share few methods and parts."""
        method = self._methods[shard]
        part = self._parts[shard]
        known = self._known.get((id(method), id(part)))
        if known is None:
            as_stored = self.held.takes_blocks
            known = tuple((stored, stored.part_for(part, as_stored)) for stored in method.tensors(part.shape))
            self._known[id(method), id(part)] = known
        return known
