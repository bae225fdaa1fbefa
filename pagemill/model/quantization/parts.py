"""Layers that a checkpoint stores in parts: queries, keys and values, or gate and up. Knows no format."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor, stacked
from pagemill.model.quantization.once import Once


def parts_note() -> Once:
    """What `stacked_with_note` says, once for each that is made."""
    return Once(
        "layers that are computed together (queries, keys and values; gate and up) but stored as %s are dequantized "
        "to %s"
    )


def stacked_with_note(
    parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype, note: Once
) -> Tensor | QuantizedTensor:
    """`stacked`; a line of the log says so where quantized parts do not go together, and become floats of `dtype`."""
    made = stacked(parts, dtype)
    if isinstance(made, Tensor) and any(isinstance(part, QuantizedTensor) for part in parts):
        kinds = list(dict.fromkeys(map(_kind, parts)))
        note.warn(" beside ".join(kinds if len(kinds) > 1 else (*kinds, "others")), str(dtype)[6:])
    return made


def _kind(part: Tensor | QuantizedTensor) -> str:
    if isinstance(part, PackedWeight):
        return part.description
    return "floats" if isinstance(part, Tensor) else "blocks"
