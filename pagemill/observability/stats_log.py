"""`StatsLog`: the figures of a front end as a line of the log, from time to time. Does not know who asks for it."""

import time
from collections.abc import Callable

from pagemill.log import get_logger
from pagemill.observability.draft_rates import DraftRates
from pagemill.observability.serving_metrics import ServingMetrics
from pagemill.observability.stat_logger import StatLogger

logger = get_logger(__name__)


class StatsLog(StatLogger):
    """Rates are those between two calls of `line`."""

    def __init__(self, metrics: ServingMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._at = clock()
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self._draft_rates = DraftRates()
        self._elapsed_s = 0.0

    def report(self) -> None:
        for line in (self.line(), self.draft_line()):
            if line is not None:
                logger.info(line)

    def draft_line(self) -> str | None:
        """What became of drafts between the last two calls of `line`; None where there were none."""
        return self._draft_rates.line(self._metrics.engines().values(), self._elapsed_s)

    def line(self) -> str | None:
        """What happened since the last call, and what there is to do; None when both are nothing."""
        now = self._clock()
        elapsed_s, self._at = max(now - self._at, 1e-9), now
        self._elapsed_s = elapsed_s
        prompt = self._metrics.total("num_prompt_tokens")
        generation = self._metrics.total("num_generation_tokens")
        num_prompt = prompt - self._num_prompt_tokens
        num_generation = generation - self._num_generation_tokens
        self._num_prompt_tokens = prompt
        self._num_generation_tokens = generation
        engines = self._metrics.engines().values()
        running = sum(e.num_running for e in engines)
        waiting = sum(e.num_waiting for e in engines)
        if not (running or waiting or num_prompt or num_generation):
            return None
        usage = sum(engine.kv_cache_usage for engine in engines) / len(engines)
        return (
            f"running: {running}, waiting: {waiting}, KV cache usage: {usage:.1%}, "
            f"prompt: {num_prompt / elapsed_s:.1f} tokens/s, generation: {num_generation / elapsed_s:.1f} tokens/s, "
            f"prefix cache hit rate: {self._metrics.prefix_hits.rate:.1%}"
        )
