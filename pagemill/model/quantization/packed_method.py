"""`PackedMethod`: what the readers of checkpoints have in common. Knows no format."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights, LinearWeight, QuantMethod


class PackedMethod(QuantMethod):
    """`tensors` and `decode` read a format; the weights are computed by the method that computes all of a model's."""

    def __init__(self, computing: QuantMethod) -> None:
        """`computing`: such as `integers.as_stored` finds for the machine."""
        self._computing = computing
        self.takes_blocks = computing.takes_blocks
        self.takes_packed = computing.takes_packed

    def prepare(self, weight: Tensor | QuantizedTensor, gate: str | None = None) -> LinearWeight:
        return self._computing.prepare(weight, gate)

    def prepare_stacked(
        self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype, gate: str | None = None
    ) -> LinearWeight:
        return self._computing.prepare_stacked(parts, dtype, gate)

    def prepare_qkv(self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype) -> LinearWeight:
        return self._computing.prepare_qkv(parts, dtype)

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        return self._computing.experts(sizes, dtype, device, gate)


def only_tensors(stored: Mapping[str, Tensor | QuantizedTensor]) -> dict[str, Tensor]:
    """What was read of a file that has no blocks of its own."""
    return {kind: tensor for kind, tensor in stored.items() if isinstance(tensor, Tensor)}
