"""Checkpoints of NVIDIA's ModelOpt: 8-bit floats with a scale per weight, and NVFP4. Knows no model.

Their configuration is hf_quant_config.json, or the same in config.json (artifacts/hf_config.py reads either).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import Axis, StoredTensor, WeightPart
from pagemill.model.quantization.fields import Fields
from pagemill.model.quantization.fp8_checkpoint import Fp8Weights
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest
from pagemill.model.quantization.packed_method import PackedMethod, only_tensors
from pagemill.model.quantization.scale_grid import TENSOR, ScaleGrid
from pagemill.model.quantization.selected import Selected
from pagemill.model.quantization.small_floats import HALVES_BITS, unpack_halves
from pagemill.utils.math import ceil_div

FP8 = "FP8"
NVFP4 = "NVFP4"
NVFP4_GROUP = 16


class Nvfp4Weights(PackedMethod):
    """weight: two floats of 4 bits in each byte; weight_scale: 8-bit floats; weight_scale_2: one for the weight."""

    _grid = ScaleGrid(1, NVFP4_GROUP)

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        packed_shape = shape[0], ceil_div(shape[1], 2)
        return (
            StoredTensor("weight", packed_shape, (torch.uint8,), rows=Axis(0), columns=Axis(1, 2)),
            self._grid.stored("weight_scale", shape, (torch.float8_e4m3fn,)),
            StoredTensor("weight_scale_2", (1,), other_shapes=((),)),
            StoredTensor("input_scale", (1,), unused=True),
        )

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        tensors = only_tensors(stored)
        first = part.columns.start % 2
        values = unpack_halves(tensors["weight"])[:, first : first + len(part.columns)].contiguous()
        scales = tensors["weight_scale"].float() * tensors["weight_scale_2"].float().reshape(()) / 2
        groups = self._grid.groups(part, values.device)
        return PackedWeight(HALVES_BITS, values, self._grid.spread(scales, part), groups, halves=True)


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
    computing = as_stored(request)
    config = Fields("quantization_config", request.config)
    algorithm = config.choose("quant_algo", (FP8, NVFP4))
    config.choose("kv_cache_quant_algo", (None, FP8))
    linear: QuantMethod = Fp8Weights(TENSOR, computing)
    if algorithm == NVFP4:
        config.choose("group_size", (None, NVFP4_GROUP))
        linear = Nvfp4Weights(computing)
    skipped = config.strings("exclude_modules") + config.strings("ignore")
    return Selected(linear, computing, skipped=skipped)
