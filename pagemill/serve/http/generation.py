"""The part of answering that chat and text completions share: run requests, then send their deltas as events or
collect them into one body. What a delta looks like is the builder's business."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.connection import EventSink, EventStream, respond_unless_gone
from pagemill.serve.http.errors import GenerationFailedError, api_error
from pagemill.serve.http.preparer import AnswerForm
from pagemill.serve.http.responses import ResponseHead, Usage
from pagemill.serve.processing.input_processor import PreparedRequest
from pagemill.serve.processing.request_stream import Sink

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


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

    async def stream(self, sink: EventSink[RequestOutput]) -> AsyncGenerator[bytes, None]:
        """Server-sent events; those of outputs that the sink gets are written there. An error after the first one
        becomes an event; before, it is raised."""
        sink.events_of = self._events
        started = False
        try:
            async with contextlib.aclosing(self._outputs(sink)) as outputs:
                async for output in outputs:
                    check_generated(output)
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
                check_generated(output)
                index = self._count(output)
                choices += [self._builder.choice(index, completion) for completion in output.outputs]
        choices.sort(key=lambda choice: int(choice["index"]))
        head = self._builder.head
        return _encode({**head.fields(self._builder.body_kind), "choices": choices, "usage": self._usage.to_json()})

    def _outputs(self, sink: Sink[RequestOutput] | None = None) -> AsyncGenerator[RequestOutput, None]:
        return self._engine.stream(self._requests, list(self._prompt_index), sink, limited=True)

    def _events(self, output: RequestOutput) -> bytes:
        """The events of an output, which is counted."""
        index = self._count(output)
        return b"".join([self._builder.events(index, completion) for completion in output.outputs])

    def _count(self, output: RequestOutput) -> int:
        """The index of its prompt."""
        index = self._prompt_index[output.request_id]
        self._usage.count(index, output)
        return index


def check_generated(output: RequestOutput) -> None:
    """Raises GenerationFailedError when the engine could not complete one of the completions."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise GenerationFailedError(completion.error)


async def answer(request: Request, form: AnswerForm, generation: Generation) -> Response:
    """The response to a checked body: a stream of events, or one JSON body unless the client is gone before."""
    headers = form.headers()
    if form.stream:
        return EventStream(generation.stream, headers)
    return await respond_unless_gone(request, _collected(generation, headers))


async def _collected(generation: Generation, headers: dict[str, str]) -> Response:
    return Response(await generation.collect(), headers=headers, media_type="application/json")
