"""`StepGraphs`: which steps are captured, and when. Knows shapes and endings, not what is computed."""

from collections.abc import Callable
from enum import Enum

from torch import Tensor

from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor
from pagemill.worker.graphs.dispatcher import Dispatcher
from pagemill.worker.graphs.graph import GraphMaker
from pagemill.worker.graphs.wrapper import GraphWrapper


class Ending(Enum):
    """What a step ends with; captured graphs differ by it."""

    GREEDY = "greedy"
    """Every row takes its most likely token."""
    RANDOM = "random"
    """Rows are sampled by their parameters, greedy ones among them."""
    LOGITS = "logits"
    """Logits, which something else changes before they are sampled."""


class StepGraphs:
    """Captures a shape when it comes the second time: the first time compiles and tunes kernels, which must not happen
    in a capture.

    `maker` None: nothing is captured, and every step is queued part by part.
    """

    def __init__(
        self, model: Callable[[Tensor, Tensor], Tensor], dispatcher: Dispatcher, maker: GraphMaker | None
    ) -> None:
        self.model = model
        """(token ids, positions) -> hidden states; cut at attention where pieces are captured."""
        self._dispatcher = dispatcher
        self._maker = maker
        self._seen: set[tuple[Ending, GraphMode, BatchDescriptor]] = set()
        self.num_replays = 0

    def wrap(self, step: Callable[[int], Tensor], ending: Ending) -> Callable[[int], Tensor]:
        """A step that is captured for each number of rows."""
        return step if self._maker is None else GraphWrapper(step, GraphMode.FULL, self._maker)

    def choose(
        self, ending: Ending, num_tokens: int, num_requests: int, *, uniform: bool
    ) -> tuple[GraphMode, BatchDescriptor]:
        """What a batch runs in, and its padded shape."""
        as_it_is = BatchDescriptor(num_tokens, num_requests, uniform)
        if self._maker is None:
            return GraphMode.NONE, as_it_is
        mode, key = self._dispatcher.dispatch(num_tokens, num_requests, uniform)
        if mode is GraphMode.FULL and not uniform:
            return GraphMode.NONE, as_it_is
        found = (ending, mode, key)
        if mode is GraphMode.NONE or found in self._seen:
            self.num_replays += mode is not GraphMode.NONE
            return mode, key
        self._seen.add(found)
        return GraphMode.NONE, key
