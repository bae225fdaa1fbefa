"""`StepGraphs`: graphs of whole steps, which differ by what the step ends with. Knows shapes, not what is computed."""

from collections.abc import Callable
from enum import Enum

from torch import Tensor

from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor
from pagemill.worker.graphs.graph_runner import Graphs


class Ending(Enum):
    """What a step ends with."""

    GREEDY = "greedy"
    """Every row takes its most likely token."""
    RANDOM = "random"
    """Rows are sampled by their parameters, greedy ones among them."""
    LOGITS = "logits"
    """Logits, which something else changes before they are sampled."""


class StepGraphs:
    """A shape is warm when it ran once with the same ending: kernels must not be compiled in a capture."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self._warm: set[tuple[Ending, BatchDescriptor]] = set()

    @property
    def num_graphs(self) -> int:
        """Graphs that there may be in the end: few decode batches need logits, and what is no decode batch ends with
        them."""
        return 2 * self.graphs.num_keys - len(self.graphs.mixed_keys)

    def wrap(self, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A step of one ending."""
        wrapped: Callable[..., Tensor] = self.graphs.wrap_step(step)
        return wrapped

    def choose(self, ending: Ending, num_rows: int) -> tuple[GraphMode, BatchDescriptor]:
        """What a decode batch of so many rows runs in, and its padded shape."""
        mode, key = self.graphs.choose(num_rows, num_rows, True)
        return self.admit(ending, mode, key), key

    def choose_mixed(
        self, num_tokens: int, num_requests: int, cascade: bool = False
    ) -> tuple[GraphMode, BatchDescriptor, bool]:
        """What any other batch runs in, its padded shape, and whether that is the shape of a whole graph."""
        # The graph for one request has no part for requests of one token (see `DeviceBatch.mixed_common`).
        count = max(num_requests, 2) if num_tokens == 1 else num_requests
        mode, key = self.graphs.choose(num_tokens, count, False, cascade=cascade)
        if cascade or key not in self.graphs.mixed_keys:
            return mode, key, False
        return self.admit(Ending.LOGITS, mode, key), key, True

    def admit(self, ending: Ending, mode: GraphMode, key: BatchDescriptor) -> GraphMode:
        """The mode, or NONE for the first step of its kind."""
        if (ending, key) in self._warm:
            return mode
        self._warm.add((ending, key))
        return GraphMode.NONE if mode is GraphMode.FULL else mode
