"""What kernels are chosen by: how many multiprocessors a GPU has, whether it is a Hopper, and what its L2 cache keeps.
Imports no compiler."""

from functools import cache

import torch

FALLBACK_PROCESSORS = 4
"""Of a device that does not say: the interpreter's."""
L2_SHARE = 20 << 20
"""Bytes of keys and values that programs read at the same time; the L2 cache has 50 MB, in two halves that both keep
what both read."""
_HOPPER = 9
"""Major compute capability."""


@cache
def num_processors(device: torch.device) -> int:
    """Of a GPU; for the interpreter as many as `FALLBACK_PROCESSORS`."""
    if device.type != "cuda":
        return FALLBACK_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels run there that are written for Hopper GPUs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


def heads_in_l2(heads: int, head_bytes: int) -> int:
    """Of so many heads with keys and values of so many bytes each, to how many programs attend at the same time: as
    many as the L2 cache keeps, of those that divide all."""
    most = min(heads, max(1, L2_SHARE // head_bytes))
    return max(count for count in range(1, most + 1) if heads % count == 0)
