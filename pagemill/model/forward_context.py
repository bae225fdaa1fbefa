"""The one guarded global: what the running forward pass needs beside its inputs. Nesting is an error.

Letters in shapes, everywhere: T tokens of the step, R requests of the step, L rows that are sampled, H heads,
D head size, E hidden size, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_current: "ForwardContext | None" = None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Metadata of one forward pass."""

    attention: Mapping[str, Any]
    """Layer name -> the metadata that its attention backend's builder made for its KV group."""


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one for the body."""
    global _current
    if _current is not None:
        raise RuntimeError("a forward pass is running already; forward passes do not nest")
    _current = context
    try:
        yield
    finally:
        _current = None


def current_forward() -> ForwardContext:
    """The running forward pass. Read by attention layers only."""
    if _current is None:
        raise RuntimeError("no forward pass is running; call the model inside forward_context(...)")
    return _current
