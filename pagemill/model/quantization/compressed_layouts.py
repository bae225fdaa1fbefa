"""The layouts in which compressed-tensors stores a weight: integers in words, plain 8-bit numbers, and 4-bit floats.

Knows no configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemill.model.kernels.pack_limits import ZeroWords
from pagemill.model.loading.few_rows import few_rows
from pagemill.model.loading.nibble_weight import NibbleWeight
from pagemill.model.loading.packed_weight import Inputs, PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import FLOATS, Axis, StoredTensor, WeightPart
from pagemill.model.quantization.bit_packing import WORD, centred, first_read, pairs, unpack
from pagemill.model.quantization.interface import QuantMethod
from pagemill.model.quantization.packed_method import PackedMethod, only_tensors
from pagemill.model.quantization.scale_grid import ScaleGrid
from pagemill.model.quantization.small_floats import EXPONENTS, HALVES_BITS, USUAL_EXPONENTS, powers, unpack_halves
from pagemill.utils.math import ceil_div

OF_INPUTS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
"""Scales of a layer's inputs: devices here find their own, for each token."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one group of layers is stored."""

    bits: int
    grid: ScaleGrid
    symmetric: bool = True
    ordered: bool = False
    """Whether each input says which group it belongs to (weight_g_idx)."""
    inputs: Inputs = Inputs.FLOATS
    powers_of_two: bool = False
    """Whether scales are exponents (e8m0)."""
    global_scale: bool = False
    """Whether scales are multiplied with the one of the whole weight, stored as its inverse."""

    def scales(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """The tensors of scales."""
        dtypes = (torch.uint8,) if self.powers_of_two else FLOATS
        if self.global_scale:
            grid = self.grid.stored("weight_scale", shape, (torch.float8_e4m3fn,))
            return grid, StoredTensor("weight_global_scale", (1,), other_shapes=((),))
        grid = self.grid.stored("weight_scale", shape, dtypes)
        return (replace(grid, values=EXPONENTS, usual=USUAL_EXPONENTS) if self.powers_of_two else grid,)

    def spread_scales(self, tensors: Mapping[str, Tensor], part: WeightPart) -> Tensor:
        """[rows of the part, G]."""
        scales = tensors["weight_scale"]
        if self.powers_of_two:
            scales = powers(scales)
        if self.global_scale:
            scales = scales.float() / tensors["weight_global_scale"].float().reshape(())
        return self.grid.spread(scales, part)


class PackedIntegers(PackedMethod):
    """weight_packed: integers in words of 32 bits. weight_zero_point: the same, along the outputs."""

    def __init__(self, scheme: Scheme, computing: QuantMethod) -> None:
        super().__init__(computing)
        self._scheme = scheme

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        scheme = self._scheme
        num_rows, width = shape
        whole_words = WORD % scheme.bits == 0  # otherwise integers lie over the ends of words
        per_word = WORD // scheme.bits
        grid = scheme.grid.stored("weight_scale", shape)
        if scheme.ordered:  # a rank's inputs may need any of the groups
            grid = StoredTensor(grid.kind, grid.shape, rows=grid.rows)
        words = ceil_div(width * scheme.bits, WORD)
        columns = Axis(1, per_word) if whole_words else None
        stored = [
            StoredTensor("weight_packed", (num_rows, words), (torch.int32,), Axis(0), columns),
            grid,
            StoredTensor("weight_shape", (2,), unused=True),
        ]
        if scheme.ordered:
            values = range(grid.shape[1])
            stored.append(StoredTensor("weight_g_idx", (width,), (torch.int32,), columns=Axis(0), values=values))
        if not scheme.symmetric:
            zeros_shape = ceil_div(num_rows * scheme.bits, WORD), grid.shape[1]
            rows = Axis(0, per_word) if whole_words else None
            stored.append(StoredTensor("weight_zero_point", zeros_shape, (torch.int32,), rows, grid.columns))
        return (*stored, *_unused_scales(scheme))

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        scheme = self._scheme
        tensors = only_tensors(stored)
        packed = tensors["weight_packed"]
        groups = scheme.grid.groups(part, packed.device)
        if scheme.ordered:
            groups = tensors["weight_g_idx"].long()
        zero_words = None if scheme.symmetric else tensors["weight_zero_point"]
        scales = scheme.spread_scales(tensors, part)
        if scheme.bits == 4 and self.takes_blocks:
            nibbles = pairs(packed, first_read(part.columns, 4, part.splits_columns), len(part.columns))
            if nibbles is not None:
                first = first_read(part.rows, 4, not part.splits_columns)
                as_stored = None if zero_words is None else ZeroWords(zero_words, 0, first=first)
                return NibbleWeight(nibbles, scales, groups, scheme.inputs, as_stored)
        zeros = None
        if zero_words is not None:
            few_groups = few_rows(zero_words.t(), len(part.rows))
            split = not part.splits_columns
            zeros = torch.cat([_range_of(few, scheme.bits, part.rows, split) for few in few_groups]).t().contiguous()
        values = _range_of(packed, scheme.bits, part.columns, part.splits_columns)
        return PackedWeight(scheme.bits, values, scales, groups, zeros, scheme.inputs)


class PlainNumbers(PackedMethod):
    """weight: integers of 8 bits, or 8-bit floats, one by one."""

    def __init__(self, scheme: Scheme, dtype: torch.dtype, computing: QuantMethod) -> None:
        super().__init__(computing)
        self._scheme = scheme
        self._dtype = dtype

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        scheme = self._scheme
        weight = StoredTensor("weight", shape, (self._dtype,), rows=Axis(0), columns=Axis(1))
        stored = (weight, *scheme.scales(shape), *_unused_scales(scheme))
        if scheme.symmetric:
            return stored
        return (*stored, scheme.grid.stored("weight_zero_point", shape, (torch.int8,)))

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        scheme = self._scheme
        tensors = only_tensors(stored)
        values = tensors["weight"].contiguous()
        zeros = None if scheme.symmetric else scheme.grid.spread(tensors["weight_zero_point"], part)
        scales = scheme.spread_scales(tensors, part)
        return PackedWeight(8, values, scales, scheme.grid.groups(part, values.device), zeros, scheme.inputs)


class PackedFloats(PackedMethod):
    """weight_packed, or `kind`: two floats of 4 bits (e2m1) in each byte."""

    def __init__(self, scheme: Scheme, computing: QuantMethod, kind: str = "weight_packed") -> None:
        super().__init__(computing)
        self._scheme = scheme
        self._kind = kind

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        packed_shape = shape[0], ceil_div(shape[1], 2)
        packed = StoredTensor(self._kind, packed_shape, (torch.uint8,), rows=Axis(0), columns=Axis(1, 2))
        return (packed, *self._scheme.scales(shape), *_unused_scales(self._scheme))

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        scheme = self._scheme
        tensors = only_tensors(stored)
        first = part.columns.start % 2
        values = unpack_halves(tensors[self._kind])[:, first : first + len(part.columns)].contiguous()
        scales = scheme.spread_scales(tensors, part).float() / 2
        groups = scheme.grid.groups(part, values.device)
        return PackedWeight(HALVES_BITS, values, scales, groups, inputs=scheme.inputs, halves=True)


def _range_of(packed: Tensor, bits: int, wanted: range, is_split: bool) -> Tensor:
    """[N, W] int32 -> [N, wanted] int8 around 0. `is_split`: whether only the words that hold them were read, which
    begin before the first where that lies within one."""
    first = first_read(wanted, bits, is_split)
    return centred(unpack(packed, bits, first + len(wanted))[:, first:], bits).contiguous()


def _unused_scales(scheme: Scheme) -> tuple[StoredTensor, ...]:
    return tuple(StoredTensor(kind, (1,), unused=True) for kind in OF_INPUTS)
