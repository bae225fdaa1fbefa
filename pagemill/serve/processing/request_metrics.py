"""`RequestMetrics`: what happens to completions, as observations. Does not know how metrics are shown."""

import time

from pagemill.messages.engine_io import FinishReason
from pagemill.observability.serving_metrics import FinishedRequest, ServingMetrics
from pagemill.serve.processing.request_stream import CompletionState


class NoMetrics:
    """Nothing is observed."""

    def tokens(self, completion: CompletionState, count: int, now: float) -> None:
        """New tokens came."""

    def ended(self, completion: CompletionState) -> None:
        """A completion ended, one way or another."""


class RequestMetrics(NoMetrics):
    """Observes into the metrics of the front end."""

    def __init__(self, metrics: ServingMetrics) -> None:
        self._metrics = metrics

    def tokens(self, completion: CompletionState, count: int, now: float) -> None:
        last = completion.last_token_at
        completion.last_token_at = now
        self._metrics.num_generation_tokens += count
        if last is not None:
            self._metrics.token_s.observe(now - last)
            return
        completion.first_token_at = now
        request = completion.stream.children[completion.index]
        self._metrics.num_prompt_tokens += len(request.prompt_token_ids)
        self._metrics.first_token_s.observe(now - request.arrival_time)

    def ended(self, completion: CompletionState) -> None:
        stream = completion.stream
        request = stream.children[completion.index]
        reason = completion.finish_reason or FinishReason.ABORT  # nobody waits for it any more
        self._metrics.finished(
            FinishedRequest(
                reason=reason.value,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_generated_tokens=len(completion.token_ids),
                num_cached_tokens=stream.num_cached_tokens or 0,
                max_tokens=request.params.max_tokens or 0,
                num_completions=len(stream.children),
                arrived=request.arrival_time,
                scheduled=completion.scheduled_at,
                first_token=completion.first_token_at,
                last_token=completion.last_token_at,
                ended=time.monotonic(),
            )
        )
