"""`require_row_wise`: whether the operations of a network give a row the same bits in any batch, on a device whose
weights and attention do. Knows operations; nothing about models."""

from typing import Final

from pagemill.errors import ConfigError
from pagemill.model.network.operations import (
    Add,
    Attend,
    Embed,
    Gate,
    Head,
    Join,
    Multiply,
    Network,
    Norm,
    Operation,
    PerHead,
    RotaryTable,
    Rotate,
    Scale,
    Select,
    SoftCap,
    Split,
    SplitHeads,
)

_COVERED: Final[tuple[type[Operation], ...]] = (
    *(Add, Attend, Embed, Gate, Head, Join, Multiply, Norm, PerHead, RotaryTable, Rotate, Scale, Select, SoftCap),
    *(Split, SplitHeads),
)
"""Elementwise, row by row in one order, or by kernels that are made for it."""


def require_row_wise(network: Network) -> None:
    """Raises ConfigError that names the operations that `deterministic` does not cover."""
    others = {_name(op) for op in network.operations if not _covers(op)}
    if others:
        raise ConfigError(
            f"deterministic=True does not cover what this model computes with: {', '.join(sorted(others))}; leave out "
            "--deterministic"
        )


def _covers(op: Operation) -> bool:
    return isinstance(op, _COVERED) and not (isinstance(op, Norm) and op.layer.centers)


def _name(op: Operation) -> str:
    return "LayerNorm" if isinstance(op, Norm) else type(op).__name__
