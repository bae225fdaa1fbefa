"""Checkpoints of bitsandbytes: 4-bit values of a table (nf4, fp4) in blocks of 64, and LLM.int8(). Knows no model.

(Dettmers et al., "QLoRA", 2023, and "LLM.int8()", 2022; scales of blocks may be in 8 bits themselves.)
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.loading.packed_weight import Inputs, PackedWeight, neighbours
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import Axis, StoredTensor, WeightPart
from pagemill.model.quantization.fields import Fields
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest
from pagemill.model.quantization.once import Once
from pagemill.model.quantization.packed_method import PackedMethod, only_tensors
from pagemill.model.quantization.selected import Selected
from pagemill.utils.math import ceil_div
from pagemill.utils.text import shown

BLOCK = 64
NESTED_BLOCK = 256
_MAX_OFFSET = 1e30
_MAX_STATE = 4096
"""Bytes of the object that comes with a weight."""


class TableWeights(PackedMethod):
    """weight: two indices of a table in each byte, the first in the high bits, all rows one after the other; absmax: a
    scale for each block of them. Where blocks are of neighbouring inputs, kernels may multiply them as they are."""

    def __init__(self, kind: str, nested: bool, computing: QuantMethod) -> None:
        """`nested`: whether scales are indices of a table, too."""
        super().__init__(computing)
        self._kind = kind
        self._nested = nested
        self._note = Once("weights of %s (bitsandbytes) are dequantized to %s: there is no kernel for them")

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        num_values = math.prod(shape)
        num_blocks = ceil_div(num_values, BLOCK)
        state = f"weight.quant_state.bitsandbytes__{self._kind}"
        packed = StoredTensor("weight", (ceil_div(num_values, 2), 1), (torch.uint8,))
        table = StoredTensor("weight.quant_map", (16,), (torch.float32,))
        usual = json.dumps(_wanted(shape, self._nested)).encode()
        described = StoredTensor(state, (0,), (torch.uint8,), max_length=_MAX_STATE, usual=usual)
        if not self._nested:
            return packed, table, described, StoredTensor("weight.absmax", (num_blocks,), (torch.float32,))
        return (
            packed,
            table,
            described,
            StoredTensor("weight.absmax", (num_blocks,), (torch.uint8,)),
            StoredTensor("weight.nested_absmax", (ceil_div(num_blocks, NESTED_BLOCK),), (torch.float32,)),
            StoredTensor("weight.nested_quant_map", (256,), (torch.float32,)),
        )

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        tensors = only_tensors(stored)
        state = _state(tensors[f"weight.quant_state.bitsandbytes__{self._kind}"], part.shape, self._nested)
        absmax = tensors["weight.absmax"]
        if self._nested:
            scales = tensors["weight.nested_absmax"].repeat_interleave(NESTED_BLOCK)[: len(absmax)]
            absmax = tensors["weight.nested_quant_map"][absmax.long()] * scales + state
        packed = tensors["weight"].flatten()
        indices = torch.stack([packed >> 4, packed & 15], -1).flatten()
        table = tensors["weight.quant_map"]
        rows = part.rows
        columns = part.columns
        if part.shape[1] % BLOCK == 0 and self.takes_packed:
            values = (indices.view(part.shape)[rows.start : rows.stop, columns.start : columns.stop] - 8).view(
                torch.int8
            )
            first = columns.start // BLOCK
            scales = absmax.view(part.shape[0], -1)[rows.start : rows.stop, first : ceil_div(columns.stop, BLOCK)]
            groups = neighbours(len(columns), BLOCK, columns.start, values.device)
            return PackedWeight(4, values.contiguous(), scales.contiguous(), groups, levels=table)
        self._note.warn(self._kind, str(dtype)[6:])
        count = math.prod(part.shape)
        whole = table[indices[:count].long()].mul_(absmax.repeat_interleave(BLOCK)[:count]).view(part.shape)
        return whole[rows.start : rows.stop, columns.start : columns.stop].to(dtype)


class Int8Weights(PackedMethod):
    """weight: integers of 8 bits; SCB: the largest absolute value of each output."""

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor("weight", shape, (torch.int8,), rows=Axis(0), columns=Axis(1)),
            StoredTensor("SCB", shape[:1], rows=Axis(0)),
            StoredTensor("weight_format", (), unused=True),
        )

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        tensors = only_tensors(stored)
        values = tensors["weight"].contiguous()
        scales = tensors["SCB"].float().unsqueeze(1) / 127
        groups = neighbours(values.shape[1], part.shape[1], 0, values.device)
        return PackedWeight(8, values, scales, groups, None, Inputs.INT8)


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
    computing = as_stored(request)
    config = Fields("quantization_config", request.config)
    in_4_bits = config.flag("load_in_4bit") or config.flag("_load_in_4bit")
    in_8_bits = config.flag("load_in_8bit") or config.flag("_load_in_8bit")
    if in_4_bits == in_8_bits:
        raise ModelError(f"{config.name}: one of load_in_4bit and load_in_8bit must be true")
    linear: QuantMethod = Int8Weights(computing)
    if in_4_bits:
        config.choose("bnb_4bit_quant_storage", (None, "uint8"))
        kind = str(config.choose("bnb_4bit_quant_type", ("nf4", "fp4")))
        linear = TableWeights(kind, config.flag("bnb_4bit_use_double_quant"), computing)
    skipped = config.strings("llm_int8_skip_modules")
    return Selected(linear, computing, skipped=skipped)


def _state(tensor: Tensor, shape: tuple[int, int], nested: bool) -> float:
    """What is added to nested scales, out of the object that describes a weight. Raises ModelError for one that does
    not fit the weight."""
    try:
        state: Any = json.loads(bytes(tensor.tolist()))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the quant_state is no JSON: {str(error)[:80]}") from error
    if not isinstance(state, dict):
        raise ModelError(f"the quant_state {shown(state)} is no object")
    for key, value in _wanted(shape, nested).items():
        if state.get(key) != value:
            raise ModelError(f"the quant_state has {key}={shown(state.get(key))}, expected {value}")
    offset = state.get("nested_offset", 0.0)
    # Compared, and not made a float: a file may hold an integer that no float can.
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) <= _MAX_OFFSET:
        raise ModelError(f"the quant_state has nested_offset={shown(offset)}, which is no number up to {_MAX_OFFSET:g}")
    return float(offset) if nested else 0.0


def _wanted(shape: tuple[int, int], nested: bool) -> dict[str, Any]:
    """What the object that describes a weight must say."""
    of_scales = {"nested_blocksize": NESTED_BLOCK} if nested else {}
    return {"blocksize": BLOCK, "shape": list(shape)} | of_scales
