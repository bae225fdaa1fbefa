"""`pagemill::attention`: attention as one operation that compilers do not look into, by the name of the layer.

Knows layers as what has been bound under their name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from pagemill.config.graph_config import ATTENTION_OP

_bound: "Mapping[str, Attends] | None" = None


class Attends(Protocol):
    """An attention layer, as the operation finds it by its name."""

    def attend(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> Tensor:
        """[T, H, D], key [T, Hkv, D], value [T, Hkv, V] -> [T, H, V]."""


@contextmanager
def bound_layers(layers: "Mapping[str, Attends]") -> Iterator[None]:
    """For the body, which runs compiled code, names mean these layers."""
    global _bound
    if _bound is not None:
        raise RuntimeError("compiled code is running already; compiled models do not nest")
    _bound = layers
    try:
        yield
    finally:
        _bound = None


@torch.library.custom_op(ATTENTION_OP, mutates_args=())
def attention(query: Tensor, key: Tensor | None, value: Tensor | None, layer: str) -> Tensor:
    """As `Attention.forward`. Raises RuntimeError for a layer that is not bound."""
    if _bound is None or layer not in _bound:
        raise RuntimeError(f"no attention layer {layer!r} is bound; bound: {', '.join(_bound or ()) or 'none'}")
    return _bound[layer].attend(query, key, value)


@attention.register_fake
def _(query: Tensor, key: Tensor | None, value: Tensor | None, layer: str) -> Tensor:
    size = query.shape[2] if value is None else value.shape[2]
    return query.new_empty(*query.shape[:2], size)
