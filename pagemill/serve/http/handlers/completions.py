"""POST /v1/completions: prompts in, their continuations out."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagemill.messages.outputs import CompletionOutput
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.connection import EventStream, respond_unless_gone
from pagemill.serve.http.handlers.generation import Generation, ResponseHead, ServedModel, now
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.processing.input_processor import RequestOptions

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

    def __init__(self, engine: AsyncLLM, model: ServedModel) -> None:
        self._engine = engine
        self._model = model

    async def respond(self, body: CompletionBody, request: Request) -> Response:
        """Check every prompt before any runs, then generate.

        Raises RequestError, EngineOverloadedError, EngineDeadError.
        """
        self._model.check(body.model)
        params = body.to_sampling_params(self._engine.default_params)
        options = RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            clamp_max_tokens=body.max_tokens is None,
        )
        prepared = [await self._engine.prepare(prompt, params, options) for prompt in body.prompt]
        echoes = [self._text_of(prompt) if body.echo else "" for prompt in body.prompt]
        head = ResponseHead(f"cmpl-{request.scope['request_id']}", self._model.name, now())
        deltas = CompletionDeltas(head, body.wants_usage, params.n, echoes)
        generation = Generation(self._engine, prepared, deltas, body.wants_usage)
        if body.stream:
            return EventStream(generation.stream)
        return await respond_unless_gone(request, self._collect(generation))

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._engine.tokenizer.decode(prompt)

    async def _collect(self, generation: Generation) -> Response:
        return Response(await generation.collect(), media_type="application/json")
