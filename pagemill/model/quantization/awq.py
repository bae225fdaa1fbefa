"""Checkpoints of AWQ: integers of 4 bits, packed along the outputs in an order of their own, with zero points.

Knows no model. (Lin et al., "AWQ", 2023; the layout is AutoAWQ's of version gemm.)
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pagemill.model.kernels.pack_limits import ZeroWords
from pagemill.model.kernels.pack_linear import Words
from pagemill.model.loading.nibble_weight import WordWeight
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import Axis, StoredTensor, WeightPart
from pagemill.model.loading.zero_words import PLACES, outputs_of
from pagemill.model.quantization.fields import Fields
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest, ShapeError
from pagemill.model.quantization.packed_method import PackedMethod, only_tensors
from pagemill.model.quantization.scale_grid import ScaleGrid
from pagemill.model.quantization.selected import Selected
from pagemill.utils.math import ceil_div

BITS = 4
PER_WORD = 8


class AwqWeights(PackedMethod):
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""

    def __init__(self, group_size: int | None, computing: QuantMethod) -> None:
        """`group_size`: None: all inputs of an output."""
        super().__init__(computing)
        self._group_size = group_size

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        num_rows, width = shape
        if num_rows % PER_WORD:
            raise ShapeError(f"a weight of {num_rows} outputs cannot be stored in words of {PER_WORD}: awq")
        size = min(self._group_size or width, width)
        num_groups = ceil_div(width, size)
        columns = None if self._group_size is None else Axis(0, size)
        words = num_rows // PER_WORD
        return (
            StoredTensor("qweight", (width, words), (torch.int32,), rows=Axis(1, PER_WORD), columns=Axis(0)),
            StoredTensor("qzeros", (num_groups, words), (torch.int32,), rows=Axis(1, PER_WORD), columns=columns),
            StoredTensor("scales", (num_groups, num_rows), rows=Axis(1), columns=columns),
        )

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        tensors = only_tensors(stored)
        words, scales, zero_words = tensors["qweight"], tensors["scales"], tensors["qzeros"]
        groups = ScaleGrid(1, self._group_size).groups(part, words.device)
        if self.takes_blocks and scales.shape[1] == words.shape[1] * PER_WORD:
            return WordWeight(Words.OF_OUTPUTS, words, scales, groups, ZeroWords(zero_words, 1, PLACES))
        first = 0 if part.splits_columns else part.rows.start % PER_WORD
        rows = slice(first, first + len(part.rows))
        values, zeros = (outputs_of(one).t().contiguous()[rows] for one in (words, zero_words))
        return PackedWeight(BITS, values, scales.t().contiguous(), groups, zeros)


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
    computing = as_stored(request)
    config = Fields("quantization_config", request.config)
    config.choose("bits" if "bits" in config.values else "w_bit", (BITS,))
    config.choose("version", (None, "gemm", "GEMM"))
    config.choose("zero_point", (None, True))
    size = config.size("group_size" if "group_size" in config.values else "q_group_size")
    skipped = config.strings("modules_to_not_convert")
    return Selected(AwqWeights(size, computing), computing, skipped=skipped)
