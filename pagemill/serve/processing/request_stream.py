"""`RequestStream`: the front end's state of one request, and `OutputQueue`, where its consumer waits.
Does not know the engine; it is told which tokens came and how it ended."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreRequest, FinishReason
from pagemill.messages.logprobs import TokenLogprobs
from pagemill.messages.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from pagemill.observability.engine_metrics import EngineMetrics
from pagemill.serve.processing.detokenizer import Detokenizer, NoText, make_detokenizer
from pagemill.serve.processing.logprobs import CompletionLogprobs, GrowingLogprobs, PromptLogprobs, TokenTexts
from pagemill.serve.processing.long_texts import joined
from pagemill.serve.processing.repetition import RepetitionWatch
from pagemill.tokenizers.interface import Tokenizer

Output = TypeVar("Output")
Pushed = TypeVar("Pushed", contravariant=True)


class Sink(Protocol[Pushed]):
    """Gets outputs where they come up. What is pushed costs no turn of the event loop: a step of many streams would
    otherwise wake as many tasks."""

    def is_open(self) -> bool:
        """Whether an output may be pushed now."""

    def push(self, output: Pushed) -> None:
        """An output, when the consumer waits for one. What this raises is raised in the consumer."""


class OutputQueue(Generic[Output]):
    """Streams that have output for one consumer. Nothing piles up: a stream waits in it once, and what arrives until
    the consumer takes its output becomes part of that output."""

    def __init__(self, sink: Sink[Output] | None = None) -> None:
        """`sink` gets, while the consumer waits, what ends nothing; the consumer gets the rest."""
        self._sink = sink
        self._ready: dict[Stream[Output], None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def mark_ready(self, stream: "Stream[Output]") -> None:
        """The stream has output."""
        if self._sink is not None and self._pending is not None and not stream.has_ended and self._sink.is_open():
            try:
                self._sink.push(stream.take())
            except Exception as error:
                self.fail(error)
            return
        self._ready[stream] = None
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the consumer, now and whenever it asks again."""
        self._error = error
        self._wake()

    async def get(self) -> Output:
        """The output of the stream that has waited longest; waits when there is none. Raises what `fail` was given."""
        while True:
            if self._error is not None:
                raise self._error
            if self._ready:
                stream = next(iter(self._ready))
                del self._ready[stream]
                output = stream.take()
                if stream.finished:
                    stream.release()
                return output
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    @property
    def _pending(self) -> asyncio.Future[None] | None:
        """What the consumer waits on, while nothing that came before is still on its way to it."""
        return None if self._waiter is None or self._waiter.done() else self._waiter

    def _wake(self) -> None:
        if (pending := self._pending) is not None:
            pending.set_result(None)


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
        "detokenizer", "error", "finish_reason", "include_stop", "index", "logprobs", "num_accepted", "num_drafts",
        "num_taken", "reported", "started", "stop_reason", "stream", "text", "timeline", "token_ids", "vector",
    )  # fmt: skip

    def __init__(
        self,
        stream: "Stream[Any]",
        index: int,
        detokenizer: Detokenizer,
        include_stop: bool,
        logprobs: GrowingLogprobs | None = None,
    ) -> None:
        """`logprobs`: where those of the tokens go, if any come."""
        self.stream = stream
        self.index = index
        self.detokenizer = detokenizer
        self.include_stop = include_stop
        """Whether the text keeps what the stop token or string stands for."""
        self.token_ids: list[int] = []
        self.logprobs = logprobs
        self.text = ""
        """As far as it was taken."""
        self.num_taken = 0
        """Tokens that a DELTA output has reported."""
        self.num_drafts = 0
        """That were verified, as far as no DELTA output has reported it; so are those that became tokens."""
        self.num_accepted = 0
        self.started = False
        """Whether the engine has produced anything."""
        self.reported = False
        """Whether the end was reported."""
        self.timeline = Timeline()
        self.vector: npt.NDArray[np.float32] | None = None
        """What the prompt became, of a pooling request."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        """What went wrong, when the finish reason is ERROR and it is known."""

    def append(
        self,
        token_ids: Sequence[int],
        stop_token_id: int | None = None,
        logprobs: TokenLogprobs | None = None,
        num_accepted: int = 0,
    ) -> bool:
        """Add new tokens, the first `num_accepted` of which were drafts, and their log-probabilities. A last token that
        is the stop token is no part of the text unless asked for.

        Returns whether a stop string or a repetition has ended the completion.
        """
        drop_last = stop_token_id is not None and not self.include_stop
        match = self.detokenizer.append(token_ids[:-1] if drop_last else token_ids)
        num_kept = len(token_ids) if match is None else match.num_tokens
        self.token_ids.extend(token_ids[:num_kept])
        self.num_accepted += min(num_accepted, num_kept)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs.rows(slice(num_kept)))
        if match is None:
            return False
        self.finish_reason = match.reason
        self.stop_reason = match.stop
        return True

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """The engine has ended it, or the front end gave it up."""
        match = self.detokenizer.finish()
        if match is not None:
            reason = FinishReason.STOP
            stop_reason = match.stop
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def take(self, delta: bool) -> CompletionOutput:
        """What there is, or what is new."""
        new_text = self.detokenizer.take()
        if delta:
            text = new_text
            token_ids = self.token_ids[self.num_taken :]
        else:
            self.text += new_text
            text = self.text
            token_ids = self.token_ids.copy()
        output = CompletionOutput(self.index, text, token_ids, None, self.stop_reason, self.error)
        if self.logprobs is not None:
            output.logprobs = self.logprobs.since(self.num_taken if delta else 0)
            output.cumulative_logprob = self.logprobs.total
        if self.num_drafts:
            output.num_draft_tokens, output.num_accepted_tokens = self.num_drafts, self.num_accepted
            if delta:
                self.num_drafts = self.num_accepted = 0
        self.num_taken = len(self.token_ids)
        if self.finish_reason is not None:
            self.reported = True
            output.finish_reason = self.finish_reason.value
        return output

    @property
    def has_delta(self) -> bool:
        """Whether a DELTA output would say anything."""
        return not self.reported and (self.finish_reason is not None or len(self.token_ids) > self.num_taken)


class Stream(ABC, Generic[Output]):
    """One request of a user: its prompt and its completions, one per child request of the engine."""

    def __init__(
        self, external_id: str, prompt: str | None, children: Sequence[EngineCoreRequest], queue: OutputQueue[Output]
    ) -> None:
        self.external_id = external_id
        self.children = children
        self.num_cached_tokens: int | None = None
        self.num_queued_tokens = len(children[0].prompt_token_ids)
        """Tokens of the prompt; 0 once the engine has worked on it."""
        self.prompt_logprobs: TokenLogprobs | None = None
        """Of the prompt's tokens but the first, where they are asked for, and the prompt is computed."""
        self.num_open = len(children)
        """Completions that have not ended."""
        self.completions: list[CompletionState] = []
        """One per child."""
        self._prompt = prompt
        self._prompt_token_ids = children[0].prompt_token_ids
        self._kind = RequestOutputKind.FINAL_ONLY
        self._queue = queue

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return self.num_open == 0

    @property
    def has_ended(self) -> bool:
        """Whether any completion has."""
        return self.num_open < len(self.children)

    def note_prompt(self, output: EngineCoreOutput) -> None:
        """What an output says of the prompt."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs

    def notify(self) -> None:
        """Tell the consumer, if there is something that it does not have, and wants to hear of already."""
        if self._kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return
        for completion in self.completions:
            if completion.has_delta:
                self._queue.mark_ready(self)
                return

    def fail(self, error: Exception) -> None:
        """Raise in the consumer."""
        self._queue.fail(error)

    def release(self) -> None:
        """Let go of the completions, which refer to this stream, when nobody asks for its output any more.

        Reference counts free them then, one by one; cycles of thousands of completions would wait for a pass of the
        garbage collector, which holds up the event loop for tens of milliseconds.
        """
        self.completions = []

    @abstractmethod
    def take(self) -> Output:
        """The output as of now; not after `release`."""


class RequestStream(Stream[RequestOutput]):
    """A request for text, with one completion or several."""

    def __init__(
        self,
        external_id: str,
        prompt: str | None,
        children: Sequence[EngineCoreRequest],
        tokenizer: Tokenizer,
        queue: OutputQueue[RequestOutput],
        texts: TokenTexts | None = None,
    ) -> None:
        """`texts`: what the tokenizer's tokens are called. Raises TypeError for a request that is not to be sampled."""
        super().__init__(external_id, prompt, children, queue)
        first = children[0]
        params = children[0].params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"text is made by SamplingParams, not by {type(params).__name__}")
        self._texts = texts or TokenTexts(tokenizer)
        self.completions = [
            CompletionState(
                self,
                index,
                _watched(make_detokenizer(tokenizer, first.prompt_token_ids, params), params),
                params.include_stop_str_in_output,
                _growing_logprobs(params, self._texts),
            )
            for index in range(len(children))
        ]
        self._kind = params.output_kind
        self._scores_prompt = params.prompt_logprobs is not None

    def take(self) -> RequestOutput:
        """The output as of now. A DELTA output lists only the completions that have something new."""
        delta = self._kind is RequestOutputKind.DELTA
        outputs = [item.take(delta) for item in self.completions if item.has_delta or not delta]
        return RequestOutput(
            request_id=self.external_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens or 0,
            prompt_logprobs=self._of_prompt(),
        )

    def _of_prompt(self) -> PromptLogprobs | None:
        """Nothing before the first completion, whose business it is, has computed the prompt."""
        if not self._scores_prompt or self.num_queued_tokens:
            return None
        arrays = self.prompt_logprobs
        if arrays is not None:
            return PromptLogprobs(CompletionLogprobs(arrays, self._texts))
        return PromptLogprobs(None) if len(self.children[0].prompt_token_ids) == 1 else None


def _growing_logprobs(params: SamplingParams, texts: TokenTexts) -> GrowingLogprobs | None:
    count = params.num_candidates
    return None if count is None else GrowingLogprobs(texts, count, params.logprob_token_ids is None)


def _watched(detokenizer: Detokenizer, params: SamplingParams) -> Detokenizer:
    """The detokenizer; one that ends repetitions, where the request asks for that."""
    wanted = params.repetition_detection
    return detokenizer if wanted is None else RepetitionWatch(detokenizer, wanted, params.min_tokens)


class PoolingStream(Stream[PoolingRequestOutput]):
    """What a prompt becomes, which comes at once or not at all; of a prompt that is split, when all parts are there."""

    def __init__(
        self,
        external_id: str,
        prompt: str | None,
        whole: EngineCoreRequest,
        parts: list[EngineCoreRequest],
        queue: OutputQueue[PoolingRequestOutput],
    ) -> None:
        """`parts`: what the engine is asked for, which is `whole` where it is not split."""
        super().__init__(external_id, prompt, parts, queue)
        self._prompt_token_ids = whole.prompt_token_ids
        self._normalizes = isinstance(whole.params, PoolingParams) and bool(whole.params.normalize)
        self.completions = [CompletionState(self, index, NoText(), False) for index in range(len(parts))]

    def take(self) -> PoolingRequestOutput:
        failed = next((part for part in self.completions if part.vector is None), None)
        last = failed or self.completions[0]
        vectors = [part.vector for part in self.completions if part.vector is not None]
        sizes = [len(part.prompt_token_ids) for part in self.children]
        data = np.zeros(0, np.float32) if failed is not None else joined(vectors, sizes, self._normalizes)
        reason = (last.finish_reason or FinishReason.ABORT).value
        return PoolingRequestOutput(
            request_id=self.external_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=PoolingOutput(data, reason, last.error),
            num_cached_tokens=self.num_cached_tokens or 0,
        )
