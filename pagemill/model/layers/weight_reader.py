"""`WeightReader`: collects what a checkpoint stores of the weights of one layer. Knows no format and no layer."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.loading.stored import LayerTensor, WeightPart
from pagemill.model.quantization.interface import QuantMethod, Role


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
        self.shapes = [part.shape for part in parts]
        self._dtype: torch.dtype = ctx.dtype
        self._methods = [ctx.method(shard, role) for shard in range(len(parts))]
        self.held = held or self._methods[0]
        self._parts = parts
        self._arrived: dict[int, dict[str, Tensor | BlockTensor]] = {}

    def tensors(self, shard: int) -> Iterator[LayerTensor]:
        """What a checkpoint holds of one weight. Raises ModelError for a shape that its method does not store."""
        part = self._parts[shard]
        for stored in self._methods[shard].tensors(part.shape):
            yield LayerTensor(stored, shard, stored.part_for(part, self.held.takes_blocks))

    def take(self, kind: str, shard: int, tensor: Tensor | BlockTensor) -> Tensor | BlockTensor | None:
        """The weight, when this is the last of its tensors. Raises ModelError for values that cannot be."""
        method, part = self._methods[shard], self._parts[shard]
        arrived = self._arrived.setdefault(shard, {})
        arrived[kind] = tensor
        if any(not stored.unused and stored.kind not in arrived for stored in method.tensors(part.shape)):
            return None
        return method.decode(self._arrived.pop(shard), part, self._dtype)
