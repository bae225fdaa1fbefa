"""`RequestMetrics`: what happens to completions, as observations. Does not know how metrics are shown."""

import time

from pagemill.messages.engine_io import EngineCoreOutput, FinishReason
from pagemill.messages.sampling_params import SamplingParams
from pagemill.observability.engine_metrics import EndedCompletion, EngineTimes
from pagemill.observability.serving_metrics import ServingMetrics
from pagemill.serve.processing.request_stream import CompletionState


class NoMetrics:
    """What is called as completions go on; nothing is observed."""

    def scheduled(self, completion: CompletionState, engine: int, output: EngineCoreOutput) -> None:
        """An engine's first output of a completion came."""

    def tokens(self, completion: CompletionState, count: int, step_at: float) -> None:
        """New tokens came, of a step that ended at `step_at` by the engine's clock."""

    def pooled(self, completion: CompletionState) -> None:
        """Its prompt became a vector."""

    def ended(self, completion: CompletionState) -> None:
        """A completion ended, one way or another; its stream counts it no more."""


class RequestMetrics(NoMetrics):
    """Observes into the metrics of the front end."""

    def __init__(self, metrics: ServingMetrics) -> None:
        self._metrics = metrics

    def scheduled(self, completion: CompletionState, engine: int, output: EngineCoreOutput) -> None:
        timeline = completion.timeline
        timeline.metrics = self._metrics.of_engine(engine)
        if timeline.scheduled is not None:  # another engine goes on with it, whose clock may be another
            timeline.comparable = False
            timeline.last_token = None
            return
        timeline.queued = output.queued_at
        timeline.scheduled = output.scheduled_at
        request = completion.stream.children[completion.index]
        self._metrics.prefix_hits.add(len(request.prompt_token_ids), output.num_cached_tokens or 0)

    def tokens(self, completion: CompletionState, count: int, step_at: float) -> None:
        timeline = completion.timeline
        metrics = timeline.metrics
        last = timeline.last_token
        if metrics is None:
            return  # nothing is known of the engine: it never said when the request ran
        timeline.last_token = step_at
        metrics.num_generation_tokens += count
        if last is not None:
            metrics.inter_token_latency_seconds.observe(step_at - last)
        elif timeline.first_token is None:
            timeline.first_token = step_at
            request = completion.stream.children[completion.index]
            metrics.num_prompt_tokens += len(request.prompt_token_ids)
            metrics.time_to_first_token_seconds.observe(time.monotonic() - request.arrival_time)

    def pooled(self, completion: CompletionState) -> None:
        metrics = completion.timeline.metrics
        if metrics is not None:
            metrics.num_prompt_tokens += len(completion.stream.children[completion.index].prompt_token_ids)

    def ended(self, completion: CompletionState) -> None:
        stream = completion.stream
        timeline = completion.timeline
        request = stream.children[completion.index]
        metrics = timeline.metrics or self._metrics.of_engine(0)
        reason = completion.finish_reason or FinishReason.ABORT  # nobody waits for it any more
        metrics.ended(
            EndedCompletion(
                reason=reason.value,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_generated_tokens=len(completion.token_ids),
                num_cached_tokens=stream.num_cached_tokens or 0,
                max_tokens=request.params.max_tokens or 0 if isinstance(request.params, SamplingParams) else None,
                e2e_s=time.monotonic() - request.arrival_time,
                times=_engine_times(completion),
            )
        )
        if stream.finished:
            metrics.request_ended(len(stream.children), max(len(item.token_ids) for item in stream.completions))


def _engine_times(completion: CompletionState) -> EngineTimes | None:
    at = completion.timeline
    if at.queued is None or at.scheduled is None or at.first_token is None or at.last_token is None:
        return None
    return EngineTimes(at.queued, at.scheduled, at.first_token, at.last_token) if at.comparable else None
