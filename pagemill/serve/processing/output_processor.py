"""`OutputProcessor`: what the engine produced is added to the streams of the requests.
Does not know how outputs travel; it only says which requests the engine need not go on with."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from pagemill.log import get_logger
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, Finish, FinishReason
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.processing.request_metrics import NoMetrics
from pagemill.serve.processing.request_stream import CompletionState, Stream

logger = get_logger(__name__)

CHUNK_ROWS = 128
"""Completions that are processed in one go; more would keep the event loop from everything else for too long."""


def in_chunks(outputs: EngineCoreOutputs, num_rows: int = CHUNK_ROWS) -> Iterator[EngineCoreOutputs]:
    """The same outputs in parts of at most `num_rows` rows or objects; in one part when they are few."""
    if len(outputs.request_ids) + len(outputs.outputs) <= num_rows:
        yield outputs
        return
    for start in range(0, len(outputs.request_ids), num_rows):
        end = start + num_rows
        yield msgspec.structs.replace(
            outputs, request_ids=outputs.request_ids[start:end], token_ids=outputs.token_ids[start:end], outputs=[]
        )
    for start in range(0, len(outputs.outputs), num_rows):
        part = outputs.outputs[start : start + num_rows]
        yield msgspec.structs.replace(outputs, request_ids=[], token_ids=[], outputs=part)


class OutputProcessor:
    """All completions in flight, by the id that the engine knows them under."""

    def __init__(self, is_end_of_sequence: Callable[[int | None], bool], metrics: NoMetrics | None = None) -> None:
        self.on_change: Callable[[], None] = _nothing
        """Called after the number of completions in flight, or of tokens that wait, has changed."""
        self.num_queued_tokens = 0
        """Prompt tokens of the requests for which the engine has done nothing yet."""
        self._completions: dict[str, CompletionState] = {}
        self._news: dict[Stream[Any], None] = {}
        """Streams that have got something since their consumers were told."""
        self._is_end_of_sequence = is_end_of_sequence
        self._metrics = metrics or NoMetrics()

    @property
    def num_in_flight(self) -> int:
        """Completions that have not ended."""
        return len(self._completions)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._completions

    def add(self, stream: Stream[Any]) -> None:
        """Expect outputs for the children of a stream."""
        for child, completion in zip(stream.children, stream.completions, strict=True):
            self._completions[child.request_id] = completion
        self.num_queued_tokens += stream.num_queued_tokens
        self.on_change()

    def process(self, outputs: EngineCoreOutputs) -> list[str]:
        """Distribute what came; `tell` lets the consumers know. Returns the ids of requests that ended here (a stop
        string, an error in their own text) while the engine still runs them. Ids that are not in flight are ignored:
        their tokens come late."""
        aborts: list[str] = []
        completions = self._completions
        news = self._news
        count = self._metrics.tokens
        step_at = outputs.step_at
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            completion = completions.get(request_id)
            if completion is not None:
                count(completion, 1, step_at)
                try:
                    stopped = completion.append((token_id,))
                except Exception as error:
                    stopped = self._give_up(request_id, completion, error)
                if stopped:
                    aborts.append(request_id)
                    self._close(request_id, completion)
                news[completion.stream] = None
        for output in outputs.outputs:
            if output.request_id in completions:
                self._process_one(output, outputs, aborts)
        if outputs.outputs or aborts:
            self.on_change()
        return aborts

    def tell(self, most: int | None = None) -> bool:
        """Tell the consumers of streams, of so many at most, that there is something for them. Returns whether there
        are others."""
        news = self._news
        for _ in range(len(news) if most is None else min(most, len(news))):
            stream = next(iter(news))
            del news[stream]
            stream.notify()
        return bool(news)

    def discard(self, streams: Iterable[Stream[Any]]) -> list[str]:
        """Forget streams whose consumer is gone. Returns the ids that the engine still runs."""
        unfinished = []
        for stream in streams:
            for child in stream.children:
                completion = self._completions.pop(child.request_id, None)
                if completion is not None:
                    unfinished.append(child.request_id)
                    self._end(completion)
            self._news.pop(stream, None)
            stream.release()
        self.on_change()
        return unfinished

    def abort(self, external_id: str | None) -> list[str]:
        """End the requests of a user's id (None: all) with the reason abort; their consumers get what there is.

        Returns the ids that the engine still runs.
        """
        found = [
            (key, item)
            for key, item in self._completions.items()
            if external_id is None or item.stream.external_id == external_id
        ]
        for request_id, completion in found:
            completion.finish(FinishReason.ABORT)
            self._close(request_id, completion)
            completion.stream.notify()
        self.on_change()
        return [request_id for request_id, _ in found]

    def fail_all(self, error: Exception) -> None:
        """Raise in every consumer; nothing is in flight afterwards."""
        for completion in self._completions.values():
            completion.finish_reason = FinishReason.ERROR
            self._end(completion)
            completion.stream.fail(error)
        self._completions.clear()
        self.on_change()

    def _process_one(self, output: EngineCoreOutput, outputs: EngineCoreOutputs, aborts: list[str]) -> None:
        completion = self._completions[output.request_id]
        finish = output.finish
        stream = completion.stream
        stream.note_prompt(output)
        self._has_begun(stream)
        if output.scheduled_at is not None:
            self._metrics.scheduled(completion, outputs.engine_index, output)
        if output.pooled is not None:
            completion.vector = output.pooled
            self._metrics.pooled(completion)
        if output.new_token_ids:
            self._metrics.tokens(completion, len(output.new_token_ids), outputs.step_at)
        try:
            stop_token_id = finish.stop_token_id if finish else None
            completion.num_drafts += output.num_drafts
            stopped = completion.append(output.new_token_ids, stop_token_id, output.logprobs, output.num_accepted)
            if finish is not None and not stopped:
                completion.finish(finish.reason, self._stop_reason(finish, completion))
        except Exception as error:
            stopped = self._give_up(output.request_id, completion, error)
        if finish is not None and finish.reason is FinishReason.ERROR:
            completion.error = finish.message
            logger.warning("request %s failed in the engine: %s", stream.external_id, finish.message)
        if finish is None and stopped:
            aborts.append(output.request_id)
        if finish is not None or stopped:
            self._close(output.request_id, completion)
        self._news[stream] = None

    def _stop_reason(self, finish: Finish, completion: CompletionState) -> int | None:
        """The stop token, unless it ended the output as the model's end of sequence: a request that ignores that stops
        at the token because it named it."""
        params = completion.stream.children[completion.index].params
        ignores = isinstance(params, SamplingParams) and params.ignore_eos
        return None if self._is_end_of_sequence(finish.stop_token_id) and not ignores else finish.stop_token_id

    def _give_up(self, request_id: str, completion: CompletionState, error: Exception) -> bool:
        """An exception while text was made belongs to this request alone. Always True: the completion has ended."""
        logger.error("request %s: its output could not be decoded", completion.stream.external_id, exc_info=error)
        completion.finish_reason = FinishReason.ERROR
        return True

    def _close(self, request_id: str, completion: CompletionState) -> None:
        del self._completions[request_id]
        self._end(completion)

    def _end(self, completion: CompletionState) -> None:
        stream = completion.stream
        stream.num_open -= 1
        if stream.finished:
            self._has_begun(stream)
        self._metrics.ended(completion)

    def _has_begun(self, stream: Stream[Any]) -> None:
        """The engine works on a request, or need not any more: its prompt waits no longer."""
        self.num_queued_tokens -= stream.num_queued_tokens
        stream.num_queued_tokens = 0


def _nothing() -> None:
    """Nobody wants to know."""
