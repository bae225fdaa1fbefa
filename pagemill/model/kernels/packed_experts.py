"""`PackedExperts`: the weights of all experts of a layer as packed integers or 4-bit floats, and what experts compute
with them: by Triton on GPUs, else plain torch.

Arguments are not checked. Letters in shapes as in kernels/moe.py; kernels/packed.py has the layout of one weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels import packed
from pagemill.model.kernels.dispatch import triton_kernels
from pagemill.model.kernels.moe import ExpertForm, reference_experts
from pagemill.model.kernels.packed import TILE, Packed


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights [out, in] of N experts, as `Packed` each, with a first dimension for the expert."""

    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    like: Packed
    """An expert's weight: its sizes, bits and group are those of all."""
    inner: int | None = None
    """Where outputs are gates and then ups, each padded to whole tiles: how many of each there are without that."""

    def expert(self, index: int) -> Packed:
        """The weight of one, as a view."""
        like = self.like
        offsets = None if self.offsets is None else self.offsets[index]
        return Packed(
            self.words[index], self.scales[index], offsets, like.num_outputs, like.num_inputs, like.bits, like.group,
            like.halves,
        )  # fmt: skip

    def takes(self, weight: Packed) -> bool:
        """Whether a weight has the form of the others."""
        like = self.like
        return (weight.num_outputs, weight.num_inputs, weight.bits, weight.group, weight.halves) == (
            like.num_outputs, like.num_inputs, like.bits, like.group, like.halves,
        ) and (weight.offsets is None) == (like.offsets is None)  # fmt: skip

    def put(self, index: int, weight: Packed) -> None:
        """Take the weight of one expert, which `takes` says yes to."""
        self.words[index].copy_(weight.words)
        self.scales[index].copy_(weight.scales)
        if self.offsets is not None and weight.offsets is not None:
            self.offsets[index].copy_(weight.offsets)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """All weights dequantized, [N, out, in] in dtype, without padding. In plain torch, since the first step of a
        model may ask for it, and in that step kernels are compiled only."""
        made = torch.stack([packed.reference_floats(self.expert(index), dtype) for index in range(len(self.words))])
        if self.inner is None:
            return made
        count, _, num_inputs = made.shape
        return made.view(count, 2, -1, num_inputs)[:, :, : self.inner].flatten(1, 2)


def padded_halves(weight: Tensor) -> Tensor:
    """Gates and then ups [2 * I, ...] -> the same, each with zeros after it up to a whole tile."""
    half = len(weight) // 2
    padding = [0, 0] * (weight.dim() - 1) + [0, -half % TILE]
    return torch.cat([functional.pad(part, padding) for part in weight.chunk(2)])


def room(num_experts: int, like: Packed, inner: int | None = None) -> PackedExperts:
    """For so many weights like one, not yet written; `inner`: of gates and ups padded by `padded_halves`."""

    def empty(part: Tensor) -> Tensor:
        return part.new_empty(num_experts, *part.shape)

    offsets = None if like.offsets is None else empty(like.offsets)
    return PackedExperts(empty(like.words), empty(like.scales), offsets, like, inner)


def experts(
    x: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    form: ExpertForm,
) -> Tensor:
    """As kernels.moe.experts: [T, E] -> [T, E], with weights [2 * I, E] and [E, I] of each expert. On a GPU, I is a
    multiple of 64, or the first weight is padded."""
    kernels = triton_kernels("moe_packed") if x.is_cuda else None
    if kernels is None:
        floats = gate_up.floats(torch.float32), down.floats(torch.float32)
        return reference_experts(x, *floats, chosen, weights, first, form)
    result: Tensor = kernels.experts(x, gate_up, down, chosen, weights, first, form)
    return result
