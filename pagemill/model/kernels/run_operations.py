"""`run_operations`: operations of a plan by themselves, on tensors in the place of buffers. Knows no operation."""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.model.kernels.mirrors import Op, Run
from pagemill.model.kernels.native import loaded_library


def run_operations(ops: Sequence[Op], buffers: Sequence[Tensor]) -> None:
    """Runs them one after the other on contiguous tensors, [T, ...] each, by the numbers that they have for their
    buffers. Raises MemoryError."""
    num_rows = len(buffers[0])
    if not num_rows:
        return
    held = (Op * len(ops))(*ops)
    addresses = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
    widths = (ctypes.c_int64 * len(buffers))(*(math.prod(buffer.shape[1:]) for buffer in buffers))
    run = Run(num_tokens=num_rows, buffers=ctypes.addressof(addresses), widths=ctypes.addressof(widths))
    if loaded_library().run_plan(ctypes.addressof(held), len(held), ctypes.addressof(run), torch.get_num_threads()):
        raise MemoryError("no memory for the working space of a step")
