"""`PieceWrapper`: a model whose parts between attention layers are captured, without a compiler.

While a shape is recorded, each attention layer ends a graph, runs, and begins the next one. Knows nothing about
attention but where it is called.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pagemill.config.graph_mode import GraphMode
from pagemill.errors import PagemillError
from pagemill.model.forward_context import BatchDescriptor, current_forward, recording_gaps
from pagemill.platforms.interface import Graph, GraphMaker
from pagemill.worker.graphs.wrapper import OnCapture, OnNoMemory, addresses, check_same


class GapBuffers:
    """Where the results of attention lie for the graph that reads them: one buffer for all layers and shapes, for a
    result is read before the next one is written."""

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def hold(self, result: Tensor) -> Tensor:
        """[T, ...] -> the same values at a fixed address. Raises PagemillError for more tokens than there is room
        for."""
        num_tokens = result.shape[0]
        if num_tokens > self._max_num_tokens:
            raise PagemillError(f"{num_tokens} tokens do not fit a graph; at most {self._max_num_tokens} do")
        key = (result.shape[1:], result.dtype, result.device)
        if key not in self._buffers:
            self._buffers[key] = result.new_empty((self._max_num_tokens, *result.shape[1:]))
        held = self._buffers[key][:num_tokens]
        held.copy_(result)
        return held


class PieceWrapper:
    """Mimics `model`, a callable of tensors at fixed addresses, in which attention layers are called. Active in
    PIECEWISE steps only; the step that records is computed like any other."""

    def __init__(
        self,
        model: Callable[..., Any],
        make_graph: GraphMaker,
        gaps: GapBuffers,
        *,
        check_addresses: bool = False,
        on_no_memory: OnNoMemory | None = None,
        on_capture: OnCapture | None = None,
    ) -> None:
        """As for `GraphWrapper`."""
        self.fn = model
        self.mode = GraphMode.PIECEWISE
        self._maker = make_graph
        self._gaps = gaps
        self._check = check_addresses
        self._on_no_memory = on_no_memory
        self._on_capture = on_capture
        self._recordings: dict[BatchDescriptor, _Recording] = {}

    def __call__(self, *args: Any) -> Any:
        context = current_forward()
        if context.graph_mode is not self.mode:
            return self.fn(*args)
        if context.descriptor is None:
            raise PagemillError("a step in PIECEWISE needs a descriptor in its forward context")
        recording = self._recordings.get(context.descriptor)
        if recording is None:
            return self._record(context.descriptor, args)
        if self._check:
            check_same(context.descriptor, recording.addresses, addresses(args))
        return recording.replay()

    def captured(self) -> tuple[BatchDescriptor, ...]:
        """The shapes that are recorded."""
        return tuple(self._recordings)

    def clear(self) -> None:
        """Drop all recordings."""
        self._recordings.clear()

    def _record(self, key: BatchDescriptor, args: tuple[Any, ...]) -> Any:
        began = time.monotonic()
        recording = _Recording(self._maker, self._gaps, addresses(args))
        recording.begin()
        try:
            with recording_gaps(recording.gap):
                result = self.fn(*args)
        except BaseException as error:
            recording.abort()
            if self._on_no_memory is None or not isinstance(error, torch.OutOfMemoryError):
                raise
            self._on_no_memory(self.mode, key)
            return self.fn(*args)
        recording.finish(pytree.tree_map_only(Tensor, self._maker.borrow, result))
        self._recordings[key] = recording
        if self._on_capture is not None:
            self._on_capture(self.mode, key, time.monotonic() - began)
        return result


@dataclass(slots=True)
class _Gap:
    """A call between two graphs."""

    call: Callable[..., Tensor]
    args: tuple[Tensor | None, ...]
    """Borrowed from the graph before it."""


@dataclass(slots=True)
class _Recording:
    """graph, gap, graph, gap, ..., graph."""

    maker: GraphMaker
    buffers: GapBuffers
    addresses: tuple[int | None, ...]
    pieces: list[Graph] = field(default_factory=list)
    gaps: list[_Gap] = field(default_factory=list)
    result: Any = None
    open: bool = False

    def begin(self) -> None:
        """Begin to record the next graph."""
        graph = self.maker.graph()
        graph.begin()
        self.pieces.append(graph)
        self.open = True

    def gap(self, call: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
        """Close the graph and run it, so that the call computes with real values; then open the next one."""
        self._close()
        held = self.buffers.hold(call(*args))
        borrowed = tuple(None if arg is None else self.maker.borrow(arg) for arg in args)
        self.gaps.append(_Gap(call, borrowed))
        self.begin()
        return held

    def finish(self, result: Any) -> None:
        """Close the last graph, and run it."""
        self._close()
        self.result = result

    def abort(self) -> None:
        """An error was raised, in a graph or between two."""
        if self.open:
            self.open = False
            self.pieces[-1].abort()

    def replay(self) -> Any:
        """All in order, attention with the metadata of the current step."""
        for piece, gap in zip(self.pieces, self.gaps, strict=False):
            piece.replay()
            self.buffers.hold(gap.call(*gap.args))
        self.pieces[-1].replay()
        return self.result

    def _close(self) -> None:
        self.open = False
        self.pieces[-1].end()
        self.pieces[-1].replay()
