"""Checkpoints of torchao as safetensors hold them: integers of 1 to 8 bits one by one or two in a byte, 8-bit floats.

Knows no model. Which of torchao's tensors a layer is follows from the `quant_type` in config.json.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.loading.packed_weight import Inputs, PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import Axis, StoredTensor, WeightPart
from pagemill.model.quantization.bit_packing import centred
from pagemill.model.quantization.fields import Fields
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest, ShapeError
from pagemill.model.quantization.packed_method import PackedMethod, only_tensors
from pagemill.model.quantization.scale_grid import OUTPUT, TENSOR, ScaleGrid
from pagemill.model.quantization.selected import Selected
from pagemill.utils.math import ceil_div
from pagemill.utils.text import shown

QDATA = "_weight_qdata"
SCALE = "_weight_scale"
ZERO = "_weight_zero_point"


class PlainWeights(PackedMethod):
    """qdata [out, in], scale and, of integers, zero_point [out, groups]."""

    def __init__(self, bits: int, grid: ScaleGrid, is_float: bool, inputs: Inputs, computing: QuantMethod) -> None:
        super().__init__(computing)
        self._bits = bits
        self._grid = grid
        self._is_float = is_float
        self._inputs = inputs

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        dtype = torch.float8_e4m3fn if self._is_float else torch.int8
        stored = (
            StoredTensor(QDATA, shape, (dtype,), rows=Axis(0), columns=Axis(1)),
            self._grid.stored(SCALE, shape),
        )
        return stored if self._is_float else (*stored, self._grid.stored(ZERO, shape, (torch.int8,)))

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        tensors = only_tensors(stored)
        values = tensors[QDATA].contiguous()
        zeros = None
        if not self._is_float and bool(tensors[ZERO].any()):
            zeros = self._grid.spread(tensors[ZERO], part)
        scales = self._grid.spread(tensors[SCALE], part)
        return PackedWeight(self._bits, values, scales, self._grid.groups(part, values.device), zeros, self._inputs)


class PairedWeights(PackedMethod):
    """qdata [out, in / 2], the first of two signed integers in the low bits; scale [groups, out]; zero_point [groups,
    out], which is added to the product of integer and scale."""

    def __init__(self, group_size: int, computing: QuantMethod) -> None:
        super().__init__(computing)
        self._grid = ScaleGrid(1, group_size)
        self._size = group_size

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        num_rows, width = shape
        if width % 2:
            raise ShapeError(f"a weight of {width} inputs cannot be stored in pairs: torchao")
        size = min(self._size, width)
        limits = ceil_div(width, size), num_rows
        return (
            StoredTensor(QDATA, (num_rows, width // 2), (torch.uint8, torch.int8), rows=Axis(0), columns=Axis(1, 2)),
            StoredTensor(SCALE, limits, rows=Axis(1), columns=Axis(0, size)),
            StoredTensor(ZERO, limits, rows=Axis(1), columns=Axis(0, size)),
        )

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        tensors = only_tensors(stored)
        packed = tensors[QDATA].view(torch.uint8)
        first = part.columns.start % 2
        nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1)[:, first : first + len(part.columns)]
        values = centred((nibbles ^ 8).contiguous(), 4)  # two's complement
        scales = tensors[SCALE].t().float().contiguous()
        zeros = tensors[ZERO].t().float() / scales.where(scales != 0, 1.0)
        return PackedWeight(4, values, scales, self._grid.groups(part, values.device), -zeros)


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
    computing = as_stored(request)
    config = Fields("quantization_config", request.config)
    of_layers = config.inside("quant_type")
    if set(of_layers.values) != {"default"}:
        raise ModelError(f"{config.name}.quant_type={shown(config.values.get('quant_type'))} is not supported: one "
                         "type for all layers, `default`")  # fmt: skip
    config.refuse("include_input_output_embeddings")
    chosen = of_layers.inside("default")
    make_method = TYPES[str(chosen.choose("_type", tuple(TYPES)))]
    skipped = config.strings("modules_to_not_convert")
    return Selected(make_method(chosen.inside("_data"), computing), computing, skipped=skipped)


def _int8(inputs: Inputs) -> Callable[[Fields, QuantMethod], QuantMethod]:
    def read(fields: Fields, computing: QuantMethod) -> QuantMethod:
        return PlainWeights(8, _granularity(fields), False, inputs, computing)

    return read


def _float8(inputs: Inputs) -> Callable[[Fields, QuantMethod], QuantMethod]:
    def read(fields: Fields, computing: QuantMethod) -> QuantMethod:
        return PlainWeights(8, _granularity(fields), True, inputs, computing)

    return read


def _intx(inputs: Inputs, granularity: str) -> Callable[[Fields, QuantMethod], QuantMethod]:
    def read(fields: Fields, computing: QuantMethod) -> QuantMethod:
        fields.inside("intx_packing_format").choose("_data", (None, "UNPACKED_TO_INT8"))
        name = fields.inside("weight_dtype").choose("_data", tuple(f"int{bits}" for bits in range(2, 9)))
        return PlainWeights(int(str(name)[3:]), _granularity(fields, granularity), False, inputs, computing)

    return read


def _int4(fields: Fields, computing: QuantMethod) -> QuantMethod:
    fields.inside("int4_packing_format").choose("_data", (None, "PLAIN"))
    return PairedWeights(fields.positive("group_size"), computing)


def _granularity(fields: Fields, key: str = "granularity") -> ScaleGrid:
    found = fields.values.get(key)
    first = found[-1] if isinstance(found, list) and found else found
    if first is None:
        return OUTPUT
    granularity = Fields(f"{fields.name}.{key}", first if isinstance(first, dict) else {"_type": first})
    kind = granularity.choose("_type", ("PerRow", "PerTensor", "PerAxis", "PerGroup"))
    if kind == "PerGroup":
        return ScaleGrid(1, granularity.inside("_data").positive("group_size"))
    if kind == "PerAxis":
        granularity.inside("_data").choose("axis", (0,))
    return TENSOR if kind == "PerTensor" else OUTPUT


TYPES: dict[str, Callable[[Fields, QuantMethod], QuantMethod]] = {
    "Int4WeightOnlyConfig": _int4,
    "Int8WeightOnlyConfig": _int8(Inputs.FLOATS),
    "Int8DynamicActivationInt8WeightConfig": _int8(Inputs.INT8),
    "Float8WeightOnlyConfig": _float8(Inputs.FLOATS),
    "Float8DynamicActivationFloat8WeightConfig": _float8(Inputs.FP8),
    "IntxWeightOnlyConfig": _intx(Inputs.FLOATS, "granularity"),
    "Int8DynamicActivationIntxWeightConfig": _intx(Inputs.INT8, "weight_granularity"),
}
"""What torchao calls a way to quantize -> what reads its tensors."""
