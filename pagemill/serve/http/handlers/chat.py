"""POST /v1/chat/completions: conversation in, assistant message out."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagemill.messages.outputs import CompletionOutput
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.connection import EventStream, respond_unless_gone
from pagemill.serve.http.handlers.generation import Generation, ResponseHead, now
from pagemill.serve.http.intake import Intake
from pagemill.serve.http.preparer import CHAT
from pagemill.serve.http.served_model import ServedModel

_encode = msgspec.json.encode


class ChatDeltas:
    """Deltas of assistant messages. The constant bytes of a choice's events are made once."""

    chunk_kind = "chat.completion.chunk"
    body_kind = "chat.completion"

    def __init__(self, head: ResponseHead, with_usage: bool, echo: str = "") -> None:
        """`echo`: what every message begins with."""
        self.head = head
        self._echo = echo
        self._prefix, self._suffix = head.around_choices(self.chunk_kind, with_usage)
        self._before_content: dict[int, bytes] = {}
        self._after_content = b'},"logprobs":null,"finish_reason":null}' + self._suffix

    def events(self, prompt_index: int, completion: CompletionOutput) -> bytes:
        """The role first, once per choice; then text; then the reason of the end."""
        events = b""
        before = self._before_content.get(completion.index)
        if before is None:
            events = self._event(completion.index, {"role": "assistant", "content": ""})
            before = self._before_content[completion.index] = (
                self._prefix + b'{"index":%d,"delta":{"content":' % completion.index
            )
            if self._echo:
                events += before + _encode(self._echo) + self._after_content
        if completion.text:
            events += before + _encode(completion.text) + self._after_content
        if completion.finish_reason is not None:
            events += self._event(completion.index, {}, completion)
        return events

    def choice(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """The message as a whole."""
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": self._echo + completion.text},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _event(self, index: int, delta: dict[str, str], finished: CompletionOutput | None = None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if finished is not None:
            choice |= {"finish_reason": finished.finish_reason, "stop_reason": finished.stop_reason}
        return self._prefix + _encode(choice) + self._suffix


class ChatHandler:
    """Answers conversations with one engine."""

    def __init__(self, engine: AsyncLLM, model: ServedModel, intake: Intake) -> None:
        self._engine = engine
        self._model = model
        self._intake = intake

    async def respond(self, request: Request) -> Response:
        """Check everything, then generate. Raises RequestError, EngineOverloadedError, EngineDeadError."""
        form, prepared, (echo,) = await self._intake.take(CHAT, request)
        head = ResponseHead(f"chatcmpl-{request.scope['request_id']}", self._model.name, now())
        deltas = ChatDeltas(head, form.with_usage, echo)
        generation = Generation(self._engine, prepared, deltas, form.with_usage)
        if form.stream:
            return EventStream(generation.stream, form.headers())
        return await respond_unless_gone(request, self._collect(generation, form.headers()))

    async def _collect(self, generation: Generation, headers: dict[str, str]) -> Response:
        return Response(await generation.collect(), headers=headers, media_type="application/json")
