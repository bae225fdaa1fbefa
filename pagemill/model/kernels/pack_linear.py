"""`pack_rows`: rows of a weight, as checkpoints have them, to the panels of the native kernels, in one native call.

Knows no format: only how long rows are.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from pagemill.model.kernels.mirrors import LinearStruct
from pagemill.model.kernels.native import loaded_library

PANEL = 32
"""Outputs of a panel, as LINEAR_PANEL in kernels.h."""
NO_GATE = 0
OCTET = 8
"""Outputs that are taken together where files have them side by side, as in kernels.h."""


class Words(IntEnum):
    """What a word of 32 bits has of a weight of integers, from its lowest bits on: PmWords in kernels.h."""

    OF_INPUTS = 0
    """Neighbouring inputs of one output, eight of 4 bits or four of 8: a weight is [in / 8, out] or [in / 4, out]."""
    OF_OUTPUTS = 1
    """Outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight neighbours, for one input, of 4 bits: a weight is [in, out / 8]."""


def pack_rows(struct: LinearStruct, parts: Sequence[Tensor], panels: Tensor) -> None:
    """Fill `panels`, contiguous, [P, ...]: the panels of `struct`'s format, cols and gate, of the rows of all parts
    [n, K], one part under the other. Each row lies together in memory, which may be mapped from a file: it is read
    once, by all threads."""
    rows = _Rows(parts, struct.gate)
    loaded_library().pack_linear(
        ctypes.addressof(struct), panels.data_ptr(), rows.addresses.data_ptr(), len(panels), torch.get_num_threads()
    )


def pack_rows_of_codes(
    struct: LinearStruct,
    codes: Sequence[Tensor],
    limits: Sequence[Tensor],
    groups: Tensor,
    order: Tensor | None,
    panels: Tensor,
) -> bool:
    """The same of integers or 8-bit floats [n, bytes], of half bytes the lower first, and limits [n, G], as panels have
    them: scales of 16 bits, or scale and minimum in 32; groups [K / 32] int32: which of them a block has. `order`: [K]
    int64, which input of a part each of a panel's is, not of floats; None: they are in order. False: some 8-bit floats
    are no numbers."""
    inputs = None if order is None else order.int()
    rows, their_limits = _Rows(codes, struct.gate), _Rows(limits, struct.gate)
    not_numbers = loaded_library().pack_codes(
        ctypes.addressof(struct),
        panels.data_ptr(),
        rows.addresses.data_ptr(),
        their_limits.addresses.data_ptr(),
        groups.data_ptr(),
        None if inputs is None else inputs.data_ptr(),
        len(panels),
        torch.get_num_threads(),
    )
    return not not_numbers


def pack_octets_of_words(
    struct: LinearStruct,
    words: Words,
    parts: Sequence[Tensor],
    limits: Sequence[Tensor],
    groups: Tensor,
    order: Tensor | None,
    panels: Tensor,
) -> None:
    """The same of integers in words of 32 bits, outputs side by side, and limits [G, n]. Each part, and with a
    gate each half of all outputs, is whole octets. `order`: [K] int64, which input of a part each of a panel's is, of
    words of inputs only."""
    inputs = None if order is None else order.int()
    octets = _Octets(parts, limits, struct.gate)
    loaded_library().pack_words(
        ctypes.addressof(struct),
        panels.data_ptr(),
        octets.table.data_ptr(),
        groups.data_ptr(),
        None if inputs is None else inputs.data_ptr(),
        words,
        len(panels),
        torch.get_num_threads(),
    )


class _Octets:
    """PmOctets of panels, as long as this lives."""

    def __init__(self, parts: Sequence[Tensor], limits: Sequence[Tensor], gate: int) -> None:
        """Parts and limits have outputs along their second dimension, one part's after the other's."""
        self._parts, self._limits = (
            [one if one.stride(1) == 1 else one.contiguous() for one in tensors] for tensors in (parts, limits)
        )
        self._zeros = torch.zeros(OCTET, dtype=torch.int32)
        counts = [part.shape[1] // OCTET for part in limits]
        octets = torch.cat([_places(self._parts, counts), _places(self._limits, counts)], 1)
        self.table = panel_rows(octets, gate, PANEL // OCTET).contiguous()
        begins = self.table[:, 0::2]
        begins[begins == 0] = self._zeros.data_ptr()


def _places(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """[octets, 2] int64: where the first row of each octet of the tensors begins in memory, and the bytes from there to
    the next; `counts`: octets of each tensor."""
    found = []
    for tensor, count in zip(tensors, counts, strict=True):
        places = torch.full((count, 2), tensor.stride(0) * tensor.element_size())
        places[:, 0] = tensor.data_ptr() + torch.arange(count) * (
            tensor.shape[1] * tensor.element_size() // max(count, 1)
        )
        found.append(places)
    return torch.cat(found)


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


def panel_rows(weight: Tensor, gate: int, panel: int = PANEL) -> Tensor:
    """[N, K] of any type -> the rows in the order of the panels, so many in each, with zeros where there is none."""
    return _in_panels(weight, panel) if gate == NO_GATE else _gated_panels(weight, panel // 2)


def _in_panels(weight: Tensor, panel: int) -> Tensor:
    """Rows up to a whole number of panels; those at the end are zeros."""
    missing = -weight.shape[0] % panel
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


def _gated_panels(weight: Tensor, size: int) -> Tensor:
    """Half a panel, `size` rows, of the first half of the rows, then the same of the second half, and so on."""
    half = weight.shape[0] // 2
    missing = -half % size
    halves = [torch.nn.functional.pad(part, (0, 0, 0, missing)) for part in (weight[:half], weight[half:])]
    return torch.stack([part.view(-1, size, weight.shape[1]) for part in halves], 1).view(-1, weight.shape[1])
