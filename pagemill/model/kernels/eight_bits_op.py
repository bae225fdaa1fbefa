"""`eight_bits_linear`: products with weights of 8 bits as an operation of torch, which a compiler takes as it is
instead of looking inside, where the number of rows decides."""

import torch
from torch import Tensor

from pagemill.model.kernels import eight_bits


@torch.library.custom_op("pagemill::eight_bits_linear", mutates_args=())
def eight_bits_linear(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, group: int, rows: int, gate: str
) -> Tensor:
    """[T, K] times a weight as in `eight_bits.EightBits` -> [T, N], with a gate (not "") half of it."""
    return eight_bits.linear(x, eight_bits.EightBits(values, scales, group, rows), bias, gate or None)


@eight_bits_linear.register_fake
def _(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, group: int, rows: int, gate: str) -> Tensor:
    return x.new_empty(x.shape[0], len(values) // 2 if gate else len(values))


def traced_linear(x: Tensor, weight: eight_bits.EightBits, bias: Tensor | None, gate: str | None) -> Tensor:
    """`eight_bits.linear`, for a compiler."""
    result: Tensor = eight_bits_linear(x, weight.values, weight.scales, bias, weight.group, weight.rows, gate or "")
    return result
