"""Checkpoints of 8-bit floats (`quant_method: fp8`): a scale per weight, or per block of 128 x 128 (DeepSeek).

Knows no model. Scales of inputs are not used: where inputs are multiplied in 8 bits, each token finds its own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.loading.packed_weight import Inputs, PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import Axis, StoredTensor, WeightPart
from pagemill.model.quantization.fields import Fields
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest
from pagemill.model.quantization.packed_method import PackedMethod, only_tensors
from pagemill.model.quantization.scale_grid import TENSOR, ScaleGrid
from pagemill.model.quantization.selected import Selected
from pagemill.utils.text import shown

OF_INPUTS = ("input_scale", "activation_scale")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Fp8Weights(PackedMethod):
    """weight: 8-bit floats; weight_scale_inv, or weight_scale: what they are multiplied with."""

    def __init__(self, grid: ScaleGrid, computing: QuantMethod) -> None:
        super().__init__(computing)
        self._grid = grid

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        scale = self._grid.stored("weight_scale_inv", shape, FLOATS, ("weight_scale",))
        weight = StoredTensor("weight", shape, (torch.float8_e4m3fn,), rows=Axis(0), columns=Axis(1))
        return (weight, scale, *(StoredTensor(kind, (1,), unused=True) for kind in OF_INPUTS))

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        tensors = only_tensors(stored)
        values = tensors["weight"].contiguous()
        scales = self._grid.spread(tensors["weight_scale_inv"], part)
        return PackedWeight(8, values, scales, self._grid.groups(part, values.device), None, Inputs.FP8)


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
    computing = as_stored(request)
    config = Fields("quantization_config", request.config)
    config.choose("fmt", (None, "e4m3"))
    config.choose("activation_scheme", (None, "dynamic", "static"))
    skipped = config.strings("ignored_layers") + config.strings("modules_to_not_convert")
    return Selected(Fp8Weights(_grid(config), computing), computing, skipped=skipped)


def _grid(config: Fields) -> ScaleGrid:
    block = config.get("weight_block_size", list)
    if block is None:
        return TENSOR
    sizes = [size for size in block if isinstance(size, int) and not isinstance(size, bool) and size > 0]
    if len(block) != 2 or len(sizes) != 2:
        raise ModelError(f"{config.name}.weight_block_size={shown(block)} is not two positive numbers")
    return ScaleGrid(sizes[0], sizes[1])
