"""What bounds a step: the settings, and a list of small functions that shrink the tokens a request may run.

Knows nothing about memory (the KV cache says what fits) or about order (queues.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagemill.config.choices import SchedulingPolicy

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SchedulerLimits:
    """Settings of the scheduler, complete."""

    max_num_batched_tokens: int
    """Tokens of one step."""
    max_num_seqs: int
    """Requests that run at once."""
    max_model_len: int
    """Tokens of prompt and output of one request."""
    enable_chunked_prefill: bool = True
    max_prefill_tokens: int = 0
    """Tokens with which a step stops to start requests, unless one alone has more; 0: no limit."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in a step; 0: no limit."""
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    """fcfs or priority."""
    jump_forward: bool = True
    """Whether tokens that a grammar forces are appended without being sampled."""
    scores_forced: bool = True
    """Whether this holds for requests for log-probabilities, too: the workers can tell those that the model gives, and
    not those of a distribution that nobody samples from."""
    holds_forced: bool = False
    """Whether forced tokens may be sampled instead, from masks of one token, where appending them saves no step."""
    num_drafts: int = 0
    """Most drafts of a request in a step, where settings ask for drafts."""
    lookahead: int = 0
    """Tokens beyond those of a step for which a running request gets blocks where there are some left: those that a
    draft model computes before it is known whether they are verified."""

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of one request in a step."""
        return min(self.max_num_batched_tokens, self.max_model_len)


TokenLimit = Callable[[IntArray, IntArray, IntArray], IntArray]
"""([R] tokens wanted, [R] tokens computed, [R] length limits) -> [R] tokens allowed."""


def room_to_limit(wanted: IntArray, computed: IntArray, length_limits: IntArray) -> IntArray:
    """The last token of a request is never computed, only sampled: steps in flight may have reached it already."""
    allowed: IntArray = np.minimum(wanted, length_limits - 1 - computed)
    return allowed


def chunk_cap(threshold: int) -> TokenLimit:
    """At most `threshold` tokens of each request, so that a long prompt leaves room for others."""

    def cap(wanted: IntArray, computed: IntArray, length_limits: IntArray) -> IntArray:
        return np.minimum(wanted, threshold)

    return cap


def token_limits(limits: SchedulerLimits) -> tuple[TokenLimit, ...]:
    """The functions that apply under these settings. A new rule of scheduling is a function and a line here."""
    chosen: list[TokenLimit] = [room_to_limit]
    if limits.enable_chunked_prefill and limits.long_prefill_token_threshold:
        chosen.append(chunk_cap(limits.long_prefill_token_threshold))
    return tuple(chosen)


def share_budget(wanted: IntArray, budget: int) -> IntArray:
    """Grant tokens in order until the budget is spent: single tokens first, so that no chunk of a long prompt makes
    the requests that are generating wait. [R] -> [R]."""
    if int(wanted.sum()) <= budget:
        return wanted
    singles = np.where(wanted == 1, wanted, 0)
    chunks = wanted - singles
    granted = np.minimum(singles, _left_in_order(singles, budget))
    return granted + np.minimum(chunks, _left_in_order(chunks, budget - int(granted.sum())))


def share_drafts(drafts: IntArray, room: IntArray, budget: int) -> IntArray:
    """Grant drafts in order until the budget is spent. [R] drafts, and [R] tokens that each request may still run; less
    than 0 for one that runs none."""
    wanted = np.clip(room, 0, drafts)
    granted: IntArray = np.minimum(wanted, _left_in_order(wanted, budget))
    return granted


def _left_in_order(wanted: IntArray, budget: int) -> IntArray:
    """What is left of the budget for each, after those before it took all they want."""
    left: IntArray = np.maximum(budget - (np.cumsum(wanted) - wanted), 0)
    return left
