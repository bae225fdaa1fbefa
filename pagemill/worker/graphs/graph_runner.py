"""`GraphRunner`: the graphs of one model runner - choice, wrappers, capture at start and while idle.

Knows shapes; the batches themselves are the runner's.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from pagemill.config.graph_mode import GraphMode
from pagemill.log import get_logger
from pagemill.model.forward_context import BatchDescriptor
from pagemill.platforms.interface import GraphMaker
from pagemill.worker.graphs.dispatcher import Dispatcher
from pagemill.worker.graphs.pieces import GapBuffers, PieceWrapper
from pagemill.worker.graphs.schedule import CaptureSchedule
from pagemill.worker.graphs.stats import GraphStats
from pagemill.worker.graphs.wrapper import GraphWrapper

logger = get_logger(__name__)

RunShape = Callable[[GraphMode, BatchDescriptor], None]
"""Runs a step of no request, on the null block, in this mode and of this shape, as `choose` might have said."""


WrapPiece = Callable[[Callable[..., Any]], Callable[..., Any]]
CompileModel = Callable[[Callable[..., Any], WrapPiece, GapBuffers], Callable[..., Any]]
"""(model, what to make of each piece, where results between pieces lie) -> the compiled model."""

REPORT_SECONDS = 10.0


class Graphs(ABC):
    """What a model runner asks about graphs. `choose` first, then a forward context with what it said, then the
    wrapped callables."""

    num_keys: int = 0
    """Shapes that may be captured."""
    num_verifying: int = 0
    """Of them, those of steps that verify drafts."""
    mixed_keys: frozenset[BatchDescriptor] = frozenset()
    """Shapes of whole steps that do more than decode."""
    max_num_tokens: int = 0
    """The largest of them."""
    compiles: bool = False
    """Whether `wrap_model` gives a compiled model."""

    @abstractmethod
    def choose(
        self, num_tokens: int, num_requests: int, uniform: bool, has_lora: bool = False, cascade: bool = False
    ) -> tuple[GraphMode, BatchDescriptor]:
        """What the step runs in, and the shape to pad the batch to, also while its graph is not there yet."""

    @abstractmethod
    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A whole step, as one graph in FULL mode; what captures it computes nothing. `wrap_model` may be called
        inside."""

    @abstractmethod
    def wrap_model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """The model alone, cut at attention in PIECEWISE mode."""

    @abstractmethod
    def keys_at_start(self) -> list[BatchDescriptor]:
        """Shapes that `capture_at_start` captures."""

    @abstractmethod
    def capture_at_start(self, run: RunShape) -> None:
        """Capture what must be there before the first request."""

    @abstractmethod
    def capture_one(self, run: RunShape) -> bool:
        """Capture one more graph, while there is nothing to do; False when all are."""

    @abstractmethod
    def drop(self, mode: GraphMode, key: BatchDescriptor) -> None:
        """Forget a graph for which there is no memory: its steps run without from the next on."""


class NoGraphs(Graphs):
    """Where nothing is captured: every step runs as it is, its model compiled or not."""

    def __init__(self, compile_model: CompileModel | None = None) -> None:
        self._compile_model = compile_model
        self.compiles = compile_model is not None

    def choose(
        self, num_tokens: int, num_requests: int, uniform: bool, has_lora: bool = False, cascade: bool = False
    ) -> tuple[GraphMode, BatchDescriptor]:
        return GraphMode.NONE, BatchDescriptor(num_tokens, num_requests, uniform, has_lora)

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return step

    def wrap_model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        if self._compile_model is None:
            return model
        return self._compile_model(model, lambda piece: piece, GapBuffers(0))

    def keys_at_start(self) -> list[BatchDescriptor]:
        return []

    def capture_at_start(self, run: RunShape) -> None:
        pass

    def capture_one(self, run: RunShape) -> bool:
        return False

    def drop(self, mode: GraphMode, key: BatchDescriptor) -> None:
        pass


class GraphRunner(Graphs):
    """Graphs that a maker makes. Some are captured before the first request, the others while there is nothing to do;
    a step whose graph is not there runs in a larger one, or without."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        make_graph: GraphMaker,
        *,
        num_warm_ups: int = 0,
        lazy: bool = True,
        check_addresses: bool = False,
        compile_model: CompileModel | None = None,
        reports: bool = False,
    ) -> None:
        """`num_warm_ups`: steps of a shape that run before it is captured. `compile_model`: cuts the model into pieces;
        without, it is cut while a piecewise graph is captured.
        `reports`: log the figures now and then."""
        self.dispatcher = dispatcher
        self.stats = GraphStats()
        keys = dispatcher.graph_keys()
        self.num_keys = len(keys)
        self.num_verifying = sum(key.query_len > 1 for _, key in keys)
        self.mixed_keys = frozenset(key for mode, key in keys if mode is GraphMode.FULL and not key.uniform)
        self.schedule = CaptureSchedule(keys, lazy=lazy)
        self.num_warm_ups = num_warm_ups
        self._warm: set[tuple[GraphMode, int, bool]] = set()
        """Kinds of graphs of which one is captured."""
        self._maker = make_graph
        self._check = check_addresses
        self._compile_model = compile_model
        self.compiles = compile_model is not None
        self._next_report = time.monotonic() + REPORT_SECONDS if reports else float("inf")
        self.max_num_tokens = max((key.num_tokens for _, key in keys), default=0)
        self.gaps = GapBuffers(self.max_num_tokens)

    def choose(
        self, num_tokens: int, num_requests: int, uniform: bool, has_lora: bool = False, cascade: bool = False
    ) -> tuple[GraphMode, BatchDescriptor]:
        wanted = self.dispatcher.dispatch(num_tokens, num_requests, uniform, has_lora, cascade)
        mode, key = wanted
        if mode is not GraphMode.NONE and not self.dispatcher.is_captured(wanted):
            self.schedule.miss(wanted)
            other = self.dispatcher.stand_in(num_tokens, num_requests, uniform, has_lora, cascade)
            mode, key = other or (GraphMode.NONE, key)
            self.stats.num_missed += 1
        self.stats.record(mode, num_tokens, key.num_tokens)
        if time.monotonic() > self._next_report:
            self._next_report = time.monotonic() + REPORT_SECONDS
            logger.info("%s", self.stats.line())
        return mode, key

    def wrap_step(self, step: Callable[..., Any]) -> GraphWrapper:
        return GraphWrapper(
            step,
            GraphMode.FULL,
            self._maker,
            check_addresses=self._check,
            on_capture=self._count,
            replay_first=False,
        )

    def wrap_model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        if self._compile_model is not None:
            return self._compile_model(model, self.wrap_piece, self.gaps)
        return PieceWrapper(
            model,
            self._maker,
            self.gaps,
            check_addresses=self._check,
            on_no_memory=self.drop,
            on_capture=self._count,
        )

    def wrap_piece(self, piece: Callable[..., Any]) -> GraphWrapper:
        """A piece of a compiled model, between two attention layers."""
        return GraphWrapper(
            piece, GraphMode.PIECEWISE, self._maker, check_addresses=self._check, on_no_memory=self.drop
        )

    def keys_at_start(self) -> list[BatchDescriptor]:
        return [key for _, key in self.schedule.at_start()]

    def capture_at_start(self, run: RunShape) -> None:
        began = time.monotonic()
        keys = self.schedule.at_start()
        for mode, key in keys:
            self._capture(mode, key, run)
        if keys:
            seconds = time.monotonic() - began
            later = len(self.schedule)
            rest = f"; {later} more while there is nothing to do" if later else ""
            logger.info("captured %d graphs in %.1f s (%s)%s", len(keys), seconds, self.dispatcher.mode.value, rest)

    def capture_one(self, run: RunShape) -> bool:
        found = self.schedule.next_idle()
        if found is None:
            return False
        self._capture(*found, run)
        return True

    def _capture(self, mode: GraphMode, key: BatchDescriptor, run: RunShape) -> None:
        kind = mode, key.query_len, key.num_requests == 1 and not key.uniform
        warm_ups = self.num_warm_ups or int(mode is GraphMode.PIECEWISE or kind not in self._warm)
        self._warm.add(kind)
        try:
            for _ in range(warm_ups):
                run(GraphMode.NONE, key)
            self._record(mode, key, run, warm=bool(warm_ups))
        except torch.OutOfMemoryError:
            self.drop(mode, key)
        if (mode, key) in self.schedule:
            self.schedule.done((mode, key))
            self.dispatcher.captured(mode, key)

    def _record(self, mode: GraphMode, key: BatchDescriptor, run: RunShape, *, warm: bool) -> None:
        """Without a warm-up, which costs as much as the capture itself, one that fails is tried again after one: a
        library may do at its first call of a size what a capture must not."""
        try:
            run(mode, key)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if warm:
                raise
            logger.debug("the %s graph of %s needs a warm-up", mode.value, key, exc_info=True)
            run(GraphMode.NONE, key)
            run(mode, key)

    def drop(self, mode: GraphMode, key: BatchDescriptor) -> None:
        logger.warning(
            "no memory for the %s graph of %d tokens; such steps run without one (less --gpu-memory-utilization "
            "leaves more room)",
            mode.value,
            key.num_tokens,
        )
        self.dispatcher.drop(mode, key)
        self.schedule.done((mode, key))

    def _count(self, mode: GraphMode, key: BatchDescriptor, seconds: float) -> None:
        self.stats.num_captured += 1
        self.stats.capture_seconds += seconds
        logger.debug("captured %s %s in %.3f s", mode.value, key, seconds)
