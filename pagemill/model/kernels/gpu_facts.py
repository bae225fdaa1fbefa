"""What kernels are chosen by: how many multiprocessors a GPU has, and whether it is a Hopper. Imports no compiler."""

from functools import cache

import torch

FALLBACK_PROCESSORS = 4
"""Of a device that does not say: the interpreter's."""
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
