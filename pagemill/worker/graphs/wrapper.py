"""`GraphWrapper`: a callable that is captured at the first call of each shape and replayed at the others.

Trusts the forward context for mode and key. Knows nothing about warm-up, batches or devices.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pagemill.config.graph_mode import GraphMode
from pagemill.errors import PagemillError
from pagemill.model.forward_context import BatchDescriptor, current_forward
from pagemill.platforms.interface import Graph, GraphMaker

OnNoMemory = Callable[[GraphMode, BatchDescriptor], None]
"""Told that a graph could not be captured; its step ran without."""
OnCapture = Callable[[GraphMode, BatchDescriptor, float], None]
"""Told that a graph was captured, and in how many seconds."""


class GraphWrapper:
    """Mimics `fn`. In a step of another mode than its own it calls `fn`; so a FULL wrapper may hold a function in
    which PIECEWISE wrappers are called: at most one of them is ever active.

    `fn` takes tensors whose addresses stay (and numbers that the key implies) and returns tensors. A call that captures
    replays at once, unless told otherwise, so that its result is as good as any other's.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mode: GraphMode,
        make_graph: GraphMaker,
        *,
        check_addresses: bool = False,
        on_no_memory: OnNoMemory | None = None,
        on_capture: OnCapture | None = None,
        replay_first: bool = True,
    ) -> None:
        """`check_addresses`: compare the arguments' addresses at each replay, for debugging. Without `on_no_memory`, a
        capture for which there is no memory raises. `replay_first`: whether the call that captures also computes.
        Raises PagemillError for a mode that no step runs in."""
        if mode not in (GraphMode.FULL, GraphMode.PIECEWISE):
            raise PagemillError(f"graphs are FULL or PIECEWISE, not {mode.value}")
        self.fn = fn
        self.mode = mode
        self._maker = make_graph
        self._check = check_addresses
        self._on_no_memory = on_no_memory
        self._on_capture = on_capture
        self._replay_first = replay_first
        self._captured: dict[BatchDescriptor, _Captured] = {}

    def __call__(self, *args: Any) -> Any:
        context = current_forward()
        if context.graph_mode is not self.mode:
            return self.fn(*args)
        if context.descriptor is None:
            raise PagemillError(f"a step in {self.mode.value} needs a descriptor in its forward context")
        captured = self._captured.get(context.descriptor)
        if captured is None:
            return self._capture(context.descriptor, args)
        if self._check:
            check_same(context.descriptor, captured.addresses, addresses(args))
        captured.graph.replay()
        return captured.result

    def captured(self) -> tuple[BatchDescriptor, ...]:
        """The shapes for which there is a graph."""
        return tuple(self._captured)

    def clear(self) -> None:
        """Drop all graphs; the next calls capture again."""
        self._captured.clear()

    def _capture(self, key: BatchDescriptor, args: tuple[Any, ...]) -> Any:
        began = time.monotonic()
        graph = self._maker.graph()
        graph.begin()
        try:
            result = self.fn(*args)
        except BaseException as error:
            graph.abort()
            if self._on_no_memory is None or not isinstance(error, torch.OutOfMemoryError):
                raise
            self._on_no_memory(self.mode, key)
            return self.fn(*args)
        graph.end()
        borrowed = pytree.tree_map_only(Tensor, self._maker.borrow, result)
        self._captured[key] = _Captured(graph, borrowed, addresses(args))
        if self._replay_first:
            graph.replay()
        if self._on_capture is not None:
            self._on_capture(self.mode, key, time.monotonic() - began)
        # Owned, not borrowed: what is captured next must not use this memory before this result has been read.
        return result


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    result: Any
    addresses: tuple[int | None, ...]


def addresses(args: tuple[Any, ...]) -> tuple[int | None, ...]:
    """Where each argument lies; None for what is no tensor."""
    return tuple(arg.data_ptr() if isinstance(arg, Tensor) else None for arg in args)


def check_same(key: BatchDescriptor, captured: tuple[int | None, ...], given: tuple[int | None, ...]) -> None:
    """Raises PagemillError when an argument is elsewhere than at capture."""
    for index, (was, now) in enumerate(zip(captured, given, strict=True)):
        if was != now:
            raise PagemillError(
                f"argument {index} of the graph for {key} lies at {_hex(now)} and was captured at {_hex(was)}; "
                "a graph reads the address that it was captured with"
            )


def _hex(address: int | None) -> str:
    return "no address" if address is None else f"{address:#x}"
