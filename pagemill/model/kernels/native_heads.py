"""`NativeHeads`: a linear layer for each head as native code takes them: for plans, and one at a time.

Letters in shapes: T tokens, H heads. Knows nothing about attention.
"""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.model.kernels.linear import PackedLinear, pack_bf16
from pagemill.model.kernels.mirrors import HeadsStruct, LinearStruct, Op
from pagemill.model.kernels.run_operations import run_operations
from pagemill.model.kernels.weight_memory import WeightMemory

HEADS = 18
"""Kind of an operation of a plan."""
NO_BUFFER = -1


class HeadParts(NamedTuple):
    """Where heads have what is read, or written, in a row: head h from element h * step + first on."""

    step: int
    first: int


@dataclass(frozen=True, slots=True)
class PlacedHeads:
    """The layers, and where in rows they read and write."""

    struct: HeadsStruct
    kept: tuple[object, ...]
    """What the struct has addresses of."""

    def operation(self, source: int, out: int) -> Op:
        """For a plan with these buffers."""
        address = ctypes.addressof(self.struct)
        return Op(kind=HEADS, input=source, out=out, residual_in=NO_BUFFER, residual_out=NO_BUFFER, heads=address)

    def apply(self, x: Tensor, out: Tensor) -> None:
        """[T, n], [T, m] bfloat16, contiguous: writes the heads' parts of `out`."""
        run_operations([self.operation(0, 1)], [x, out])


@dataclass(frozen=True, slots=True)
class NativeHeads:
    """[T, in] -> [T, out] for each head, without biases."""

    layers: tuple[PackedLinear, ...]

    @staticmethod
    def of(weights: Tensor, memory: WeightMemory) -> "NativeHeads":
        """Packs [H, out, in] bfloat16, of an even number of inputs."""
        return NativeHeads(tuple(pack_bf16(weight, memory=memory) for weight in weights))

    def placed(self, reads: HeadParts, writes: HeadParts) -> PlacedHeads:
        """The layers for rows that are laid out so."""
        structs = (LinearStruct * len(self.layers))(*(layer.struct for layer in self.layers))
        struct = HeadsStruct(ctypes.addressof(structs), len(structs), *reads, *writes)
        return PlacedHeads(struct, (structs, self.layers))


def packs_heads(weights: Tensor) -> bool:
    """Whether weights [H, out, in] are such that native code takes them."""
    return weights.is_cpu and weights.dtype == torch.bfloat16 and weights.shape[2] % 2 == 0
