"""The one guarded global: what the running forward pass needs in addition to its inputs. Nesting is an error.

Knows which graph a step is to run in, not how graphs are made.

Letters in shapes, everywhere: T tokens of the step, R requests of the step, L rows that are sampled, H heads,
D head size, E hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pagemill.config.graph_mode import GraphMode

_current: "ForwardContext | None" = None
_gap: "Gap | None" = None

Gap = Callable[..., Tensor]
"""gap(call, *args): runs the call outside the graph that is being captured; its result as the next graph reads it."""


class BatchDescriptor(NamedTuple):
    """The shape of a padded batch, as far as a captured graph depends on it: its key."""

    num_tokens: int
    """T, padding included."""
    num_requests: int | None
    """R, padding included; None where the graph does not depend on it, for attention is not in it."""
    uniform: bool = False
    """Whether this is a decode step: every request has the same number of tokens; or at most as many, where they verify
    drafts."""
    has_lora: bool = False

    @property
    def query_len(self) -> int:
        """Tokens per request of a decode step; 0: it is something else."""
        return self.num_tokens // self.num_requests if self.uniform and self.num_requests else 0


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Metadata of one forward pass."""

    attention: Mapping[str, Any]
    """Layer name -> the metadata that its attention backend's builder made for its KV group."""
    graph_mode: GraphMode = GraphMode.NONE
    """NONE, PIECEWISE or FULL: what this step runs in. Graph wrappers trust it."""
    descriptor: BatchDescriptor | None = None
    """The graph's key; None outside graphs."""
    token_types: Tensor | None = None
    """[T] int64, 0 for tokens of a first text and 1 for those of a second, for models that tell them apart; None: all
    are 0."""


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
    """The running forward pass. Read by attention layers, and by who cares what it runs in."""
    if _current is None:
        raise RuntimeError("no forward pass is running; call the model inside forward_context(...)")
    return _current


@contextmanager
def recording_gaps(gap: Gap) -> Iterator[None]:
    """For the body, layers that cannot be captured are called through `gap`."""
    global _gap
    if _gap is not None:
        raise RuntimeError("gaps are recorded already; recordings do not nest")
    _gap = gap
    try:
        yield
    finally:
        _gap = None


def current_gap() -> Gap | None:
    """How to call what cannot be captured; None: directly. Read by attention layers only."""
    return _gap
