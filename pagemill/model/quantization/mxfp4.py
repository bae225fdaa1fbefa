"""Checkpoints of gpt-oss (`quant_method: mxfp4`): the experts are 4-bit floats in groups of 32, all else is floats.

Knows no model. Layers that have their experts in one tensor find the format by `merged_tensors` and `decode_merged`.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pagemill.model.loading.packed_weight import PackedWeight, neighbours
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import StoredTensor
from pagemill.model.quantization.fields import Fields
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest, Role, ShapeError
from pagemill.model.quantization.packed_method import PackedMethod
from pagemill.model.quantization.small_floats import EXPONENTS, HALVES_BITS, USUAL_EXPONENTS, powers, unpack_halves

GROUP = 32
"""Inputs that share a scale."""


def stored_experts(name: str, num_experts: int, shape: tuple[int, int]) -> tuple[StoredTensor, StoredTensor]:
    """What a checkpoint holds of the weights [out, in] of all experts: NAME_blocks [N, out, in / 32, 16] and
    NAME_scales [N, out, in / 32]. Raises ShapeError for inputs that are no whole groups."""
    num_rows, width = shape
    if width % GROUP:
        raise ShapeError(f"{name}: {width} inputs are no whole groups of {GROUP}: mxfp4")
    scales = (num_experts, num_rows, width // GROUP)
    return (
        StoredTensor(f"{name}_blocks", (*scales, GROUP // 2), (torch.uint8,)),
        StoredTensor(f"{name}_scales", scales, (torch.uint8,), values=EXPONENTS, usual=USUAL_EXPONENTS),
    )


def expert_weight(blocks: Tensor, scales: Tensor) -> PackedWeight:
    """Of one expert, blocks [out, in / 32, 16] and scales [out, in / 32] -> its weight [out, in]."""
    values = unpack_halves(blocks).flatten(1)
    groups = neighbours(values.shape[1], GROUP, 0, values.device)
    return PackedWeight(HALVES_BITS, values, powers(scales) / 2, groups, halves=True)


class Mxfp4Experts(PackedMethod):
    """Merged experts in blocks."""

    def merged_tensors(self, name: str, num_experts: int, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        width, num_rows = shape
        return stored_experts(name, num_experts, (num_rows, width))

    def decode_merged(
        self, name: str, stored: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Iterator[Tensor | QuantizedTensor]:
        for blocks, scales in zip(stored[f"{name}_blocks"], stored[f"{name}_scales"], strict=True):
            yield expert_weight(blocks, scales)


class Mxfp4(Quantization):
    """Experts in blocks, everything else as floats."""

    def __init__(self, computing: QuantMethod) -> None:
        self._floats = computing
        self._experts = Mxfp4Experts(computing)

    def method(self, module: str, role: Role) -> QuantMethod:
        return self._experts if module.endswith(".experts") else self._floats


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged."""
    Fields("quantization_config", request.config).strings("modules_to_not_convert")
    return Mxfp4(as_stored(request))
