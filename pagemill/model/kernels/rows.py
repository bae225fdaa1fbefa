"""Rows of a matrix by their indices, the faster way of the two that PyTorch has."""

import torch
from torch import Tensor

_FEW = range(2, 17)
"""How many rows index_select takes one after the other on a GPU: 16 of 4,096 numbers in 7.7 us on an H200, and by an
index in 1.5. One row, and more than these, are as fast or faster by index_select."""


def rows_at(x: Tensor, indices: Tensor) -> Tensor:
    """[N, ...], [R] integers -> [R, ...]."""
    if x.is_cuda and not torch.compiler.is_compiling() and len(indices) in _FEW:
        return x[indices]
    return x.index_select(0, indices)
