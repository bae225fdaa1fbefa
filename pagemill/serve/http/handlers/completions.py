"""POST /v1/completions: prompts in, their continuations out."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagemill.messages.outputs import CompletionOutput
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.connection import EventStream, respond_unless_gone
from pagemill.serve.http.handlers.generation import Generation, ResponseHead, now
from pagemill.serve.http.intake import Intake
from pagemill.serve.http.preparer import COMPLETIONS
from pagemill.serve.http.served_model import ServedModel

_encode = msgspec.json.encode


class CompletionDeltas:
    """Deltas of texts. Choices are numbered prompt by prompt: prompt index x n + index of the completion."""

    chunk_kind = "text_completion"
    body_kind = "text_completion"

    def __init__(self, head: ResponseHead, with_usage: bool, num_per_prompt: int, echoes: Sequence[str]) -> None:
        self.head = head
        self._num_per_prompt = num_per_prompt
        self._echoes = echoes
        """Per prompt, what its texts begin with."""
        self._prefix, self._suffix = head.around_choices(self.chunk_kind, with_usage)
        self._before_text: dict[int, bytes] = {}
        self._after_text = b',"logprobs":null,"finish_reason":null}' + self._suffix

    def events(self, prompt_index: int, completion: CompletionOutput) -> bytes:
        """The text, if any; with the reason when it ends."""
        index, text = prompt_index * self._num_per_prompt + completion.index, completion.text
        before = self._before_text.get(index)
        if before is None:
            before = self._before_text[index] = self._prefix + b'{"index":%d,"text":' % index
            text = self._echoes[prompt_index] + text
        if completion.finish_reason is not None:
            return self._prefix + _encode(self._whole(index, text, completion)) + self._suffix
        return before + _encode(text) + self._after_text if text else b""

    def choice(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """The text as a whole."""
        index = prompt_index * self._num_per_prompt + completion.index
        return self._whole(index, self._echoes[prompt_index] + completion.text, completion)

    def _whole(self, index: int, text: str, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }


class CompletionHandler:
    """Continues texts with one engine."""

    def __init__(self, engine: AsyncLLM, model: ServedModel, intake: Intake) -> None:
        self._engine = engine
        self._model = model
        self._intake = intake

    async def respond(self, request: Request) -> Response:
        """Check every prompt before any runs, then generate.

        Raises RequestError, EngineOverloadedError, EngineDeadError.
        """
        form, prepared, echoes = await self._intake.take(COMPLETIONS, request)
        head = ResponseHead(f"cmpl-{request.scope['request_id']}", self._model.name, now())
        deltas = CompletionDeltas(head, form.with_usage, form.num_per_prompt, echoes)
        generation = Generation(self._engine, prepared, deltas, form.with_usage)
        if form.stream:
            return EventStream(generation.stream, form.headers())
        return await respond_unless_gone(request, self._collect(generation, form.headers()))

    async def _collect(self, generation: Generation, headers: dict[str, str]) -> Response:
        return Response(await generation.collect(), headers=headers, media_type="application/json")
