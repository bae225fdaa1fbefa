"""The part of answering that chat and text completions share: run requests, then send their deltas as events or
collect them into one body. What a delta looks like is the builder's business."""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.connection import Outlet
from pagemill.serve.http.errors import GenerationFailedError, api_error
from pagemill.serve.processing.input_processor import PreparedRequest

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class Usage:
    """Token counts of one HTTP request."""

    def __init__(self, requests: Sequence[PreparedRequest], block_size: int) -> None:
        """`block_size`: tokens of a block of the prefix cache."""
        self._requests = requests
        self._block_size = block_size
        self._num_prompt_tokens = sum(len(item.request.prompt_token_ids) for item in requests)
        self._num_cached = [0] * len(requests)
        self._num_completion_tokens = 0

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        """Add what is new."""
        request = self._requests[prompt_index].request
        self._num_cached[prompt_index] = told_cached_tokens(request, output.num_cached_tokens, self._block_size)
        for completion in output.outputs:
            self._num_completion_tokens += len(completion.token_ids)

    def to_json(self) -> dict[str, Any]:
        """The usage object of the API."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }


def told_cached_tokens(request: EngineCoreRequest, num_cached: int, block_size: int) -> int:
    """How many cached tokens of a prompt its client is told of. Whole blocks, where the prefix may be another client's:
    to the token, it could be guessed one token after the other."""
    return num_cached if request.cache_salt is not None else num_cached - num_cached % block_size


class ResponseHead(msgspec.Struct, frozen=True):
    """What all events of a response repeat."""

    id: str
    model: str
    created: int

    def fields(self, kind: str) -> dict[str, Any]:
        """As the first fields of a body; `kind` is the API's name of the object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def around_choices(self, kind: str, with_usage: bool) -> tuple[bytes, bytes]:
        """The constant bytes before and after the one choice of an event."""
        prefix = b"data: " + _encode(self.fields(kind))[:-1] + b',"choices":['
        return prefix, b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def usage_event(self, kind: str, usage: Usage) -> bytes:
        """The event after the last choice, on request."""
        return b"data: " + _encode({**self.fields(kind), "choices": [], "usage": usage.to_json()}) + b"\n\n"


class DeltaBuilder(Protocol):
    """How one endpoint writes what is new, as events of a stream or as choices of a body."""

    head: ResponseHead
    chunk_kind: str
    """Name of an event's object."""
    body_kind: str
    """Name of the body's object."""

    def events(self, prompt_index: int, completion: CompletionOutput) -> bytes:
        """The events for a delta; none (b"") when there is nothing to say yet."""

    def choice(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """The choice for a whole completion."""


class Generation:
    """Requests that are checked and ready to run, and the builder of their answer."""

    def __init__(
        self, engine: AsyncLLM, requests: Sequence[PreparedRequest], builder: DeltaBuilder, with_usage: bool = False
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._builder = builder
        self._with_usage = with_usage
        self._usage = Usage(requests, engine.block_size)
        name = builder.head.id
        ids = [name] if len(requests) == 1 else [f"{name}-{index}" for index in range(len(requests))]
        self._prompt_index = {request_id: index for index, request_id in enumerate(ids)}

    async def stream(self, outlet: Outlet) -> AsyncGenerator[bytes, None]:
        """Server-sent events; those that the outlet takes are written there. An error after the first one becomes an
        event; before, it is raised."""
        started = False
        try:
            async with contextlib.aclosing(self._outputs(EventTap(self._events, outlet))) as outputs:
                async for output in outputs:
                    events = self._events(output)
                    if events:
                        started = True
                        yield events
        except Exception as error:
            if not started:
                raise
            yield b"data: " + api_error(error).body() + b"\n\n" + DONE
            return
        head = self._builder.head
        yield (head.usage_event(self._builder.chunk_kind, self._usage) if self._with_usage else b"") + DONE

    async def collect(self) -> bytes:
        """The JSON body, choices in order of prompt and index."""
        choices: list[dict[str, Any]] = []
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for output in outputs:
                index = self._count(output)
                choices += [self._builder.choice(index, completion) for completion in output.outputs]
        choices.sort(key=lambda choice: int(choice["index"]))
        head = self._builder.head
        return _encode({**head.fields(self._builder.body_kind), "choices": choices, "usage": self._usage.to_json()})

    async def _outputs(self, tap: "EventTap | None" = None) -> AsyncGenerator[RequestOutput, None]:
        """As they come. Raises GenerationFailedError."""
        stream = self._engine.stream(self._requests, list(self._prompt_index), tap, limited=True)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                for completion in output.outputs:
                    if completion.finish_reason == "error":
                        raise GenerationFailedError(completion.error)
                yield output

    def _events(self, output: RequestOutput) -> bytes:
        """The events of an output, which is counted."""
        index = self._count(output)
        return b"".join([self._builder.events(index, completion) for completion in output.outputs])

    def _count(self, output: RequestOutput) -> int:
        """The index of its prompt."""
        index = self._prompt_index[output.request_id]
        self._usage.count(index, output)
        return index


class EventTap:
    """Outputs as events, straight to the connection. Implements `Tap`."""

    def __init__(self, events: Callable[[RequestOutput], bytes], outlet: Outlet) -> None:
        self.is_open = outlet.is_open
        self._events = events
        self._write = outlet.write

    def take(self, output: RequestOutput) -> None:
        """Write its events, if it has any."""
        events = self._events(output)
        if events:
            self._write(events)


def now() -> int:
    """Unix time in seconds, as the API gives it."""
    return int(time.time())
