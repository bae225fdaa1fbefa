"""`Admission`: which waiting requests start to run in a step. Knows nothing about those that run already, beyond the
blocks they will still take."""

import time

import numpy as np

from pagemill.engine.kv_cache.block_pool import IntegrityError
from pagemill.engine.kv_cache.manager import CachedPrefix, KVCacheManager
from pagemill.engine.request import Request
from pagemill.engine.scheduler.limits import SchedulerLimits, token_limits
from pagemill.engine.scheduler.queues import WaitingQueue
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.engine.scheduler.step_builder import StepBuilder
from pagemill.log import get_logger
from pagemill.messages.step import NewRequest

logger = get_logger(__name__)

WATERMARK = 0.01
"""Share of all blocks that admission leaves free while others run, so that these can grow for a while."""


class Admission:
    """Starts waiting requests in order, while slots, budget and blocks last. Nobody overtakes a request that does not
    fit: what is freed goes to it, so that a long prompt is not starved by short ones."""

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager, states: SlotStates, waiting: WaitingQueue) -> None:
        self.num_prefix_queries = 0
        """Prompt tokens ever looked up in the prefix cache, each request's once."""
        self.num_prefix_hits = 0
        """Those of them that were found."""
        self._limits = limits
        self._token_limits = token_limits(limits)
        self._kv = kv
        self._states = states
        self._waiting = waiting
        self._watermark = int(WATERMARK * kv.pool.num_blocks)
        self._blocked: tuple[Request, int] | None = None
        """The first in the queue, found not to fit when so many blocks had ever become free."""

    def is_stuck(self, request: Request) -> bool:
        """Whether the first in the queue cannot start before somebody ends or gives way."""
        return not self._states.num_free or self._blocked == (request, self._kv.pool.num_frees)

    def admit(self, step: StepBuilder, firsts_only: bool = False) -> list[tuple[Request, Exception]]:
        """Start what fits; `firsts_only`: up to a completion that is not the first of its call. Returns the requests
        whose own data failed: they hold nothing and wait no longer."""
        failed: list[tuple[Request, Exception]] = []
        while len(self._waiting) and self._states.num_free and step.budget_left > 0:
            request = self._waiting.peek()
            if (firsts_only and request.rank) or self._blocked == (request, self._kv.pool.num_frees):
                break
            try:
                admitted = self._try_admit(request, step)
            except IntegrityError:
                raise  # blocks of others are at stake
            except Exception as error:
                logger.exception("request %s failed on admission", request.request_id)
                self._kv.free(request)
                if request.slot is not None:
                    self._states.release([request.slot])
                self._waiting.remove(request)
                failed.append((request, error))
                continue
            if not admitted:
                break
        return failed

    def _try_admit(self, request: Request, step: StepBuilder) -> bool:
        kv = self._kv
        prefix = kv.cached_prefix(request)
        count = self._first_tokens(request, prefix.num_tokens)
        if not self._has_room(step, count):
            return False
        count = min(count, step.budget_left)
        target = prefix.num_tokens + count
        block_ids = kv.begin(request, prefix, target) if self._fits(request, prefix) else None
        if block_ids is None:
            self._blocked = (request, kv.pool.num_frees)
            return False
        states = self._states
        slot = states.assign(request, target)
        states.capacity[slot] = kv.capacity(target)
        states.next_commit[slot] = (target // kv.granularity + 1) * kv.granularity
        # From here on nothing depends on the request's data: what others find by prefix will be computed.
        kv.commit(request, target)
        self._waiting.remove(request)
        self._count_prefix(request, prefix)
        new = NewRequest(
            request_id=request.request_id,
            slot=slot,
            token_ids=np.array(request.token_ids, np.int32),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=prefix.num_tokens,
            block_ids=block_ids,
            params=request.params,
            scores_prompt=request.scores_prompt,
            scores_from=request.forced.unscored_from,
            cache_salt=request.cache_salt,
        )
        step.admit(new, count)
        return True

    def _first_tokens(self, request: Request, num_computed: int) -> int:
        """Tokens that the request may run at once, the budget aside."""
        wanted, computed, length_limit = np.array(
            [[request.num_tokens - num_computed], [num_computed], [request.length_limit]]
        )
        for limit in self._token_limits:
            wanted = limit(wanted, computed, length_limit)
        return int(wanted[0])

    def _has_room(self, step: StepBuilder, count: int) -> bool:
        """Whether a request that would run so many tokens may start in the step. It is not cut to fill up the limit
        of prompts: half a prompt yields no token."""
        if count > step.budget_left and not self._limits.enable_chunked_prefill:
            return False
        most = self._limits.max_prefill_tokens
        started = step.num_admitted_tokens
        return not (most and started and started + count > most)

    def _fits(self, request: Request, prefix: CachedPrefix) -> bool:
        """Whether all of the request's tokens fit, beside what the running prompts will still take. While others
        run, some blocks are left for them to grow, so that nobody is admitted just to be preempted."""
        states = self._states
        kv = self._kv
        step_tokens = self._limits.max_step_tokens
        running = states.running
        behind = running[states.num_computed[running] < states.num_known[running]]
        reserved = sum(
            kv.blocks_left(states.occupant(slot), int(states.num_known[slot]), step_tokens) for slot in behind.tolist()
        )
        headroom = self._watermark if running.size else 0
        return kv.blocks_to_finish(request, prefix, step_tokens) + reserved + headroom <= kv.pool.num_free

    def _count_prefix(self, request: Request, prefix: CachedPrefix) -> None:
        if request.num_cached_tokens is not None:
            return
        request.scheduled_at = time.monotonic()
        request.num_cached_tokens = min(prefix.num_tokens, request.num_prompt_tokens)
        if request.reads_all_tokens:
            return  # it was not looked up
        self.num_prefix_queries += request.num_prompt_tokens
        self.num_prefix_hits += request.num_cached_tokens
