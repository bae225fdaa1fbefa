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


def require_shown(network: Network, tied: bool) -> None:
    """For GPUs, where a model without norms of heads and with a tied head was seen to give a row other bits in another
    batch, by a cause that is not known: raises ConfigError for a model that has either. `tied`: whether the output head
    is the embedding."""
    normed = {value for op in network.operations if isinstance(op, Norm) for value in op.outputs}
    turned = {op.outputs[0]: op.inputs[0] for op in network.operations if isinstance(op, Rotate)}
    attended = [value for op in network.operations if isinstance(op, Attend) for value in op.inputs[:2]]
    lacks = [
        *(["norms of query and key heads"] if any(turned.get(each, each) not in normed for each in attended) else []),
        *(["an output head of its own"] if tied else []),
    ]
    if lacks:
        raise ConfigError(
            f"deterministic=True on a GPU is for models such as Qwen3, and this one has not {', nor '.join(lacks)}: in "
            "another batch a row may have other bits; leave out --deterministic"
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
