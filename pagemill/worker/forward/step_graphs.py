"""`StepGraphs`: graphs of whole steps, and of how decode steps end. Knows shapes, not what is computed."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor
from pagemill.worker.graphs.dispatcher import CHEAP_TOKENS
from pagemill.worker.graphs.graph_runner import Graphs


class StepTail(Enum):
    """What a step ends with."""

    GREEDY = "greedy"
    """Every row takes its most likely token."""
    RANDOM = "random"
    """Rows are sampled by their parameters, greedy ones among them."""
    LOGITS = "logits"
    """Logits, which something else changes before they are sampled."""


CAPTURED_TAILS = (StepTail.GREEDY, StepTail.RANDOM)
"""Each is a small graph of its own behind that of the network, which they share: a batch may change its tail."""


class StepGraphs:
    """Graphs as steps ask for them. `verify_lens`: ascending, tokens per request of steps that verify drafts."""

    def __init__(self, graphs: Graphs, verify_lens: Sequence[int] = ()) -> None:
        self.graphs = graphs
        self.verify_lens = verify_lens

    @property
    def num_graphs(self) -> int:
        """Graphs that there may be in the end, those that only end a step counted as what they take: a fourth more."""
        return self.graphs.num_keys * 5 // 4

    @property
    def num_verifying(self) -> int:
        """Graphs of steps that verify drafts, that there may be in the end."""
        return self.graphs.num_verifying

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A whole step, or the end of one."""
        return self.graphs.wrap_step(step)

    def choose(self, num_rows: int) -> tuple[GraphMode, BatchDescriptor]:
        """What a decode batch of so many rows runs in, and its padded shape."""
        return self.graphs.choose(num_rows, num_rows, True)

    def verify_len(self, longest: int) -> int:
        """What steps that verify drafts, of requests of at most so many tokens, are padded to; 0: nothing."""
        return next((length for length in self.verify_lens if length >= longest), 0)

    def choose_verification(self, num_tokens: int, num_requests: int, longest: int) -> BatchDescriptor | None:
        """The graph of a step that verifies drafts and computes nothing else; None: it runs as any other batch."""
        padded = self.verify_len(longest) * num_requests
        if not 0 < padded <= max(CHEAP_TOKENS, 2 * num_tokens):
            return None
        mode, key = self.graphs.choose(padded, num_requests, True)
        return key if mode is GraphMode.FULL and key.uniform else None

    def choose_mixed(
        self, num_tokens: int, num_requests: int, cascade: bool = False
    ) -> tuple[GraphMode, BatchDescriptor, bool]:
        """What any other batch runs in, its padded shape, and whether that is the shape of a whole graph."""
        # The graph for one request has no part for requests of one token (see `DeviceBatch.mixed_common`).
        count = max(num_requests, 2) if num_tokens == 1 else num_requests
        mode, key = self.graphs.choose(num_tokens, count, False, cascade=cascade)
        return mode, key, not cascade and key in self.graphs.mixed_keys
