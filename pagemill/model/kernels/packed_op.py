"""`packed_linear`: products with packed integers as an operation of torch, which a compiler takes as it is instead of
looking inside, where the number of rows decides."""

import torch
from torch import Tensor

from pagemill.model.kernels import packed


@torch.library.custom_op("pagemill::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    outputs: int,
    bits: int,
    group: int,
    halves: bool,
    gate: str,
) -> Tensor:
    """[T, K] times a weight as in `packed.Packed` -> [T, outputs], with a gate (not "") half of it."""
    weight = packed.Packed(words, scales, offsets, outputs, x.shape[1], bits, group, halves)
    return packed.linear(x, weight, bias, gate or None)


@packed_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    outputs: int,
    bits: int,
    group: int,
    halves: bool,
    gate: str,
) -> Tensor:
    return x.new_empty(x.shape[0], outputs // 2 if gate else outputs)


def traced_linear(x: Tensor, weight: packed.Packed, bias: Tensor | None, gate: str | None) -> Tensor:
    """`packed.linear`, for a compiler."""
    result: Tensor = packed_linear(
        x,
        weight.words,
        weight.scales,
        weight.offsets,
        bias,
        weight.num_outputs,
        weight.bits,
        weight.group,
        weight.halves,
        gate or "",
    )
    return result
