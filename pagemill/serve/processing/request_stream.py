"""`RequestStream`: the front end's state of one request, and `OutputQueue`, where its consumer waits.
Does not know the engine; it is told which tokens came and how it ended."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.messages.engine_io import EngineCoreRequest, FinishReason
from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.messages.sampling_params import RequestOutputKind
from pagemill.observability.engine_metrics import EngineMetrics
from pagemill.serve.processing.detokenizer import Detokenizer, make_detokenizer
from pagemill.tokenizers.interface import Tokenizer


class OutputQueue:
    """Streams that have news for one consumer. Nothing piles up: a stream waits in it once, and what arrives until
    the consumer takes its output becomes part of that output."""

    def __init__(self) -> None:
        self._ready: dict[RequestStream, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def mark_ready(self, stream: "RequestStream") -> None:
        """The stream has news."""
        self._ready[stream] = None
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the consumer, now and whenever it asks again."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The news of the stream that has waited longest; waits when there is none. Raises what `fail` was given."""
        while True:
            if self._error is not None:
                raise self._error
            if self._ready:
                stream = next(iter(self._ready))
                del self._ready[stream]
                return stream.take()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class Timeline:
    """What the metrics remember of one completion. Times are seconds of its engine's clock."""

    metrics: EngineMetrics | None = None
    """Of the engine that works on it; None before its first output."""
    queued: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    comparable: bool = True
    """Whether all times are of one engine."""


class CompletionState:
    """One completion on its way: its tokens so far and its text."""

    __slots__ = (
        "detokenizer", "finish_reason", "include_stop", "index", "num_taken", "reported", "started", "stop_reason",
        "stream", "text", "timeline", "token_ids",
    )  # fmt: skip

    def __init__(self, stream: "RequestStream", index: int, detokenizer: Detokenizer, include_stop: bool) -> None:
        self.stream = stream
        self.index = index
        self.detokenizer = detokenizer
        self.include_stop = include_stop
        """Whether the text keeps what the stop token or string stands for."""
        self.token_ids: list[int] = []
        self.text = ""
        """As far as it was taken."""
        self.num_taken = 0
        """Tokens that a DELTA output has reported."""
        self.started = False
        """Whether the engine has produced anything."""
        self.reported = False
        """Whether the end was reported."""
        self.timeline = Timeline()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def append(self, token_ids: Sequence[int], stop_token_id: int | None = None) -> bool:
        """Add new tokens. A last token that is the stop token is no part of the text unless asked for.

        Returns whether a stop string has ended the completion.
        """
        drop_last = stop_token_id is not None and not self.include_stop
        match = self.detokenizer.append(token_ids[:-1] if drop_last else token_ids)
        if match is None:
            self.token_ids.extend(token_ids)
            return False
        self.token_ids.extend(token_ids[: match.num_tokens])
        self.finish_reason, self.stop_reason = FinishReason.STOP, match.stop
        return True

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """The engine has ended it, or the front end gave it up."""
        match = self.detokenizer.finish()
        if match is not None:
            reason, stop_reason = FinishReason.STOP, match.stop
        self.finish_reason, self.stop_reason = reason, stop_reason

    def take(self, delta: bool) -> CompletionOutput:
        """What there is, or what is new."""
        new_text = self.detokenizer.take()
        if delta:
            text, token_ids = new_text, self.token_ids[self.num_taken :]
        else:
            self.text += new_text
            text, token_ids = self.text, self.token_ids.copy()
        self.num_taken = len(self.token_ids)
        self.reported = self.finish_reason is not None
        reason = None if self.finish_reason is None else self.finish_reason.value
        return CompletionOutput(self.index, text, token_ids, reason, self.stop_reason)

    @property
    def has_news(self) -> bool:
        """Whether a DELTA output would say anything."""
        return not self.reported and (self.finish_reason is not None or len(self.token_ids) > self.num_taken)


class RequestStream:
    """One request of a user: its prompt and its completions, one per child request of the engine."""

    def __init__(
        self,
        external_id: str,
        prompt: str | None,
        children: Sequence[EngineCoreRequest],
        tokenizer: Tokenizer,
        queue: OutputQueue,
    ) -> None:
        first, params = children[0], children[0].params
        self.external_id = external_id
        self.children = children
        self.num_cached_tokens: int | None = None
        self.num_open = len(children)
        """Completions that have not ended."""
        self.completions = [
            CompletionState(
                self,
                index,
                make_detokenizer(tokenizer, first.prompt_token_ids, params),
                params.include_stop_str_in_output,
            )
            for index in range(len(children))
        ]
        self._prompt = prompt
        self._prompt_token_ids = first.prompt_token_ids
        self._kind = params.output_kind
        self._queue = queue

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return self.num_open == 0

    def notify(self) -> None:
        """Tell the consumer, if it wants to hear of this already."""
        if self._kind is not RequestOutputKind.FINAL_ONLY or self.finished:
            self._queue.mark_ready(self)

    def fail(self, error: Exception) -> None:
        """Raise in the consumer."""
        self._queue.fail(error)

    def take(self) -> RequestOutput:
        """The output as of now. A DELTA output lists only the completions that have news."""
        delta = self._kind is RequestOutputKind.DELTA
        outputs = [item.take(delta) for item in self.completions if item.has_news or not delta]
        return RequestOutput(
            request_id=self.external_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens or 0,
        )
