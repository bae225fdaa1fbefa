"""Linear layers on packed weights: the layouts, and the call. Arguments are not checked: callers are layers of ours.

Knows nothing about checkpoints or layers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.model.kernels.mirrors import LinearStruct
from pagemill.model.kernels.native import ACTIVATIONS, DTYPES, library, loaded_library
from pagemill.model.kernels.pack_linear import NO_GATE, PANEL, num_panels, pack_rows
from pagemill.model.kernels.weight_memory import WeightMemory

BF16_PANELS = 0
SILU = 1
GELU_TANH = 2


class PanelForm(NamedTuple):
    """What panels hold: the numbers of a `LinearStruct`."""

    format: int
    rows: int
    cols: int
    gate: int


@dataclass(frozen=True)
class PackedLinear:
    """A weight in the kernels' layout, with what it is called with."""

    struct: LinearStruct
    tensors: tuple[Tensor, ...]
    """Whose addresses the struct holds."""
    out_features: int
    """Columns of the result."""


def packs_natively() -> bool:
    """Whether panels are the fastest form here: where the vectors are wide enough."""
    loaded = library()
    return loaded is not None and loaded.isa() != b"portable"


def pack_bf16(
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    gate: int = NO_GATE,
    memory: WeightMemory | None = None,
) -> PackedLinear:
    """[N, K] bfloat16, K even, or such weights one under the other -> panels of outputs, each [K / 2, outputs, 2], in
    `memory` or a mapping of its own. With a gate, N is that of both halves, and there is no bias."""
    parts = [weight] if isinstance(weight, Tensor) else weight
    rows = sum(len(part) for part in parts)
    cols = parts[0].shape[1]
    shape = num_panels(rows, gate), cols // 2, PANEL, 2
    panels = (memory or WeightMemory()).empty(*shape, dtype=torch.bfloat16)
    biases = () if bias is None else (bias.float().contiguous(),)
    struct = LinearStruct(panels.data_ptr(), biases[0].data_ptr() if biases else None, BF16_PANELS, rows, cols, gate)
    pack_rows(struct, parts, panels)
    return PackedLinear(struct, (panels, *biases), rows if gate == NO_GATE else rows // 2)


def with_bias(packed: PackedLinear, bias: Tensor) -> PackedLinear:
    """The same weight, and [N] added to its results."""
    values = bias.float().contiguous()
    struct = LinearStruct.from_buffer_copy(packed.struct)
    struct.bias = values.data_ptr()
    return PackedLinear(struct, (*packed.tensors, values), packed.out_features)


def with_order(packed: PackedLinear, order: Tensor) -> PackedLinear:
    """The same weight, whose inputs are those of a row that `order`, [K] integers, says: x[:, order]. Not for panels of
    bfloat16."""
    places = order.to(torch.int32).contiguous()
    struct = LinearStruct.from_buffer_copy(packed.struct)
    struct.order = places.data_ptr()
    return PackedLinear(struct, (*packed.tensors, places), packed.out_features)


def with_activation(packed: PackedLinear, activation: str) -> PackedLinear:
    """The same weight, and the activation of its results, by its name in `native.ACTIVATIONS`. Not for one with a
    gate."""
    struct = LinearStruct.from_buffer_copy(packed.struct)
    struct.activation = ACTIVATIONS[activation]
    return PackedLinear(struct, packed.tensors, packed.out_features)


def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[M, K] bfloat16 -> [M, N], gated: [M, N / 2]. Rows of x may be slices of a wider tensor."""
    out = torch.empty(x.shape[0], packed.out_features, dtype=out_dtype)
    loaded_library().linear(
        ctypes.addressof(packed.struct), out.data_ptr(), x.data_ptr(), x.shape[0], x.stride(0), out.stride(0),
        DTYPES[out_dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def weight_rows(indices: Tensor, packed: PackedLinear) -> Tensor:
    """[T] int64 -> [T, K] bfloat16: rows of a weight without a gate. Raises IndexError when there is no such row."""
    indices = indices.contiguous()
    out = torch.empty(len(indices), packed.struct.cols, dtype=torch.bfloat16)
    failed = loaded_library().linear_rows(
        ctypes.addressof(packed.struct), out.data_ptr(), indices.data_ptr(), len(indices), torch.get_num_threads()
    )
    if failed:
        raise IndexError(f"a row is asked for that is not one of {packed.struct.rows}")
    return out
