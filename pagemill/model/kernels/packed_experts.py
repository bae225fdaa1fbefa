"""`PackedExperts`: the weights of all experts of a layer as packed integers or 4-bit floats, and what experts compute
with them: by Triton on GPUs, else plain torch.

Arguments are not checked. Letters in shapes as in kernels/moe.py; kernels/packed.py has the layout of one weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels import packed
from pagemill.model.kernels.dispatch import triton_kernels
from pagemill.model.kernels.moe import ExpertForm, reference_experts
from pagemill.model.kernels.packed import Packed


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights [out, in] of N experts, as `Packed` each, with a first dimension for the expert."""

    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    like: Packed
    """An expert's weight: its sizes, bits and group are those of all."""

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
        """All weights dequantized, [N, out, in] in dtype."""
        return torch.stack([packed.floats(self.expert(index), dtype) for index in range(len(self.words))])


def room(num_experts: int, like: Packed) -> PackedExperts:
    """For so many weights like one, not yet written."""

    def empty(part: Tensor) -> Tensor:
        return part.new_empty(num_experts, *part.shape)

    offsets = None if like.offsets is None else empty(like.offsets)
    return PackedExperts(empty(like.words), empty(like.scales), offsets, like)


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
    multiple of 64."""
    kernels = triton_kernels("moe_packed") if x.is_cuda else None
    if kernels is None:
        floats = gate_up.floats(torch.float32), down.floats(torch.float32)
        return reference_experts(x, *floats, chosen, weights, first, form)
    result: Tensor = kernels.experts(x, gate_up, down, chosen, weights, first, form)
    return result
