"""`pack_rows`: rows of a weight, as checkpoints have them, to the panels of the native kernels, in one native call.

Knows no format: only how long rows are.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.model.kernels.mirrors import LinearStruct
from pagemill.model.kernels.native import loaded_library

PANEL = 32
"""Outputs of a panel, as LINEAR_PANEL in kernels.h."""
NO_GATE = 0


def pack_rows(struct: LinearStruct, parts: Sequence[Tensor], panels: Tensor) -> None:
    """Fill `panels`, contiguous, [P, ...]: the panels of `struct`'s format, cols and gate, of the rows of all parts
    [n, K], one part under the other. Each row lies together in memory, which may be mapped from a file: it is read
    once, by all threads."""
    rows = _Rows(parts, struct.gate)
    loaded_library().pack_linear(
        ctypes.addressof(struct), panels.data_ptr(), rows.addresses.data_ptr(), len(panels), torch.get_num_threads()
    )


def pack_rows_of_codes(
    struct: LinearStruct, codes: Sequence[Tensor], scales: Sequence[Tensor], groups: Tensor, panels: Tensor
) -> bool:
    """The same of integers or 8-bit floats [n, bytes] in the order of their inputs, of half bytes the lower first, and
    scales [n, G] float16, as panels have them; groups [K / 32] int32: which of them a block has. False: some 8-bit
    floats are no numbers."""
    rows, their_scales = _Rows(codes, struct.gate), _Rows(scales, struct.gate)
    not_numbers = loaded_library().pack_codes(
        ctypes.addressof(struct),
        panels.data_ptr(),
        rows.addresses.data_ptr(),
        their_scales.addresses.data_ptr(),
        groups.data_ptr(),
        len(panels),
        torch.get_num_threads(),
    )
    return not not_numbers


class _Rows:
    """Where the rows of panels are, as long as this lives."""

    def __init__(self, parts: Sequence[Tensor], gate: int) -> None:
        """Parts [n, K], one under the other."""
        self._parts = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
        self._zeros = torch.zeros(parts[0].shape[1] * parts[0].element_size(), dtype=torch.uint8)
        ordered = panel_rows(torch.cat([_addresses(part) for part in self._parts]).unsqueeze(1), gate).flatten()
        self.addresses = torch.where(ordered == 0, self._zeros.data_ptr(), ordered)


def num_panels(rows: int, gate: int) -> int:
    """Of so many rows, with a gate those of both halves."""
    return -(-rows // PANEL) if gate == NO_GATE else -(-(rows // 2) // (PANEL // 2))


def _addresses(part: Tensor) -> Tensor:
    """[N] int64: where each row of a matrix begins in memory."""
    return part.data_ptr() + torch.arange(len(part)) * (part.stride(0) * part.element_size())


def panel_rows(weight: Tensor, gate: int) -> Tensor:
    """[N, K] of any type -> the rows in the order of the panels, with zeros where there is none."""
    return _in_panels(weight) if gate == NO_GATE else _gated_panels(weight)


def _in_panels(weight: Tensor) -> Tensor:
    """Rows up to a whole number of panels; those at the end are zeros."""
    missing = -weight.shape[0] % PANEL
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


def _gated_panels(weight: Tensor) -> Tensor:
    """Half a panel of the first half of the rows, then the same of the second half, and so on."""
    half = weight.shape[0] // 2
    size = PANEL // 2
    missing = -half % size
    halves = [torch.nn.functional.pad(part, (0, 0, 0, missing)) for part in (weight[:half], weight[half:])]
    return torch.stack([part.view(-1, size, weight.shape[1]) for part in halves], 1).view(-1, weight.shape[1])
