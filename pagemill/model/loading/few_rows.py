"""`few_rows`: a matrix in pieces, for several operations one after the other. Knows nothing about what is in it."""

from collections.abc import Iterator

from torch import Tensor

VALUES_AT_ONCE = 32_768
"""On CPUs: so many stay in a core's caches from one operation to the next, and torch asks no other thread to help, for
which, on a machine that is busy, it waits longer than the operation takes."""
VALUES_ELSEWHERE = 1 << 24
"""So that what operations leave on the way takes little memory."""


def few_rows(tensor: Tensor, width: int) -> Iterator[Tensor]:
    """[N, ...] -> its rows, in their order, few at a time: `width` is how many values are made of one."""
    most = VALUES_AT_ONCE if tensor.device.type == "cpu" else VALUES_ELSEWHERE
    at_once = max(1, most // max(1, width))
    for begin in range(0, len(tensor), at_once):
        yield tensor[begin : begin + at_once]
