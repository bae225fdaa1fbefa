"""`StackedExperts`: the usual experts of one layer, whose weights a checkpoint has in one tensor for all, as [out, in]:
gates and ups in one, [X, 2 * I, E], and what leads back in another, [X, E, I]."""

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.experts import DOWN, GATE, UP, Experts
from pagemill.model.loading.part import Part
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import LayerTensor, StoredTensor
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.quantization.interface import Role

BOTH = 0
"""The tensor that has gates and ups; the next one has what leads back."""


class StackedExperts(Experts):
    """Held and computed as `Experts`; each is taken out of the tensor of all when that arrives."""

    role = Role.STACKED

    def __init__(
        self,
        size: int,
        inner_size: int,
        num_experts: int,
        activation: str,
        *,
        ctx: LayerContext,
        kinds: tuple[str, str] | None = None,
    ) -> None:
        """As `Experts`. `kinds`: what the checkpoint calls the two tensors, as parts of one layer; None: the two are
        weights of layers of their own."""
        super().__init__(size, inner_size, num_experts, activation, ctx=dataclasses.replace(ctx, names=WeightMap()))
        self._shapes = (num_experts, 2 * inner_size, size), (num_experts, size, inner_size)
        self._kinds = kinds

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        """Both, of the experts that are held here."""
        part = Part(0, self.held.start, self.held.stop)
        for index, shape in enumerate(self._shapes):
            if self._kinds is None:
                yield LayerTensor(StoredTensor("weight", shape), index, part)
            else:
                yield LayerTensor(StoredTensor(self._kinds[index], shape), 0, part)

    def load(self, kind: str, shard: int, tensor: Tensor | QuantizedTensor) -> None:
        """Take one of them. Raises ModelError for one that is quantized."""
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{self.name}: experts in one tensor are to be floats")
        index = shard if self._kinds is None else self._kinds.index(kind)
        inner = self.inner
        whole = self._shapes[1][2]
        for expert, weight in zip(self.held, tensor, strict=True):
            if index == BOTH:
                super().load("weight", 3 * expert + GATE, weight[inner.start : inner.stop])
                super().load("weight", 3 * expert + UP, weight[whole + inner.start : whole + inner.stop])
            else:
                super().load("weight", 3 * expert + DOWN, weight[:, inner.start : inner.stop].contiguous())
