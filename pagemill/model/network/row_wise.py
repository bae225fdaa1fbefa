"""`require_row_wise`: whether the operations of a network give a row the same bits in any batch, on a device whose
weights and attention do. Knows operations; nothing about models."""

from typing import Final

from pagemill.errors import ConfigError
from pagemill.model.layers.moe.merged_experts import MergedExperts
from pagemill.model.network.operations import (
    Add,
    AllReduce,
    ApplyExperts,
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
    Route,
    Scale,
    Select,
    SoftCap,
    Split,
    SplitHeads,
)

_COVERED: Final[tuple[type[Operation], ...]] = (
    *(Add, AllReduce, ApplyExperts, Attend, Embed, Gate, Head, Join, Multiply, Norm, PerHead, RotaryTable, Rotate),
    *(Route, Scale, Select, SoftCap, Split, SplitHeads),
)
"""Elementwise, row by row in one order, or by kernels that are made for it; sums over ranks, of two at most
(config/rules/deterministic.py), which have one order only."""


def require_row_wise(network: Network) -> None:
    """Raises ConfigError that names the operations that `deterministic` does not cover."""
    others = {_name(op) for op in network.operations if not _covers(op)}
    if others:
        raise ConfigError(
            f"deterministic=True does not cover what this model computes with: {', '.join(sorted(others))}; leave out "
            "--deterministic"
        )


def _covers(op: Operation) -> bool:
    return isinstance(op, _COVERED) and not (_centers(op) or _multiplies_whole(op))


def _name(op: Operation) -> str:
    if _centers(op):
        return "LayerNorm"
    return "experts in one tensor" if _multiplies_whole(op) else type(op).__name__


def _centers(op: Operation) -> bool:
    return isinstance(op, Norm) and op.layer.centers


def _multiplies_whole(op: Operation) -> bool:
    """Whether experts are multiplied by whoever multiplies matrices, by sizes."""
    return isinstance(op, ApplyExperts) and isinstance(op.layer, MergedExperts)
