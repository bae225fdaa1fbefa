"""POST /api/chat, /api/generate and /api/embed: Ollama's API, for its clients. Streams are lines of JSON."""

import functools
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.http.connection import LargeJson, respond_unless_gone
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import OLLAMA, ApiError
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.message_choice import MakeParser, MessageChoice
from pagemill.serve.http.preparer import OLLAMA_CHAT, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, OLLAMA_GENERATE, AnswerForm
from pagemill.serve.http.responses import ResponseHead, Usage, now
from pagemill.serve.http.routes.anthropic import arguments_of
from pagemill.serve.http.routes.embeddings import here_for_vectors, vectors_of
from pagemill.serve.http.schemas.answers import OllamaAnswer, OllamaVector, OllamaVectors
from pagemill.serve.http.schemas.ollama import OllamaChatBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaGenerateBody
from pagemill.serve.http.site_guard import ANY_CONTENT_TYPE
from pagemill.serve.http.state import services
from pagemill.serve.parsers.interface import Delta
from pagemill.serve.processing.input_processor import PreparedRequest
from pagemill.utils.pacer import in_slices

router = APIRouter()
NDJSON = "application/x-ndjson"
DONE_REASONS = {"length": "length", "abort": "abort"}
"""Why an answer ended -> what clients are told. Whatever else ended it: it stopped."""
_encode = msgspec.json.encode


def _answers(body: type[BaseModel]) -> dict[str, Any]:
    """What a route that generates says of its bodies: lines of JSON where it streams."""
    return ANY_CONTENT_TYPE | describes(OllamaAnswer, body=body, event=OllamaAnswer, stream_type=NDJSON)


@router.post("/api/chat", response_model=None, openapi_extra=_answers(OllamaChatBody))
async def chat(request: Request) -> Response:
    """Continue a conversation; without messages, say that the model is loaded.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    return await _generate(request, OLLAMA_CHAT, is_chat=True)


@router.post("/api/generate", response_model=None, openapi_extra=_answers(OllamaGenerateBody))
async def generate(request: Request) -> Response:
    """Answer a prompt, through the chat template unless it is raw; without one, say that the model is loaded.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    return await _generate(request, OLLAMA_GENERATE, is_chat=False)


async def _generate(request: Request, kind: str, is_chat: bool) -> Response:
    here = services(request)
    form, prepared, _ = await here.intake.prepare(kind, request)
    if not prepared:
        loaded = Message(here.model.name, is_chat).line("", "", []) | {"done": True, "done_reason": "load"}
        media_type = NDJSON if form.stream else "application/json"
        return Response(_encode(loaded) + b"\n" * form.stream, headers=form.headers(), media_type=media_type)
    head = ResponseHead(request.scope["request_id"], here.model.name, now())
    make_parser = functools.partial(here.parsers.make, form.message)
    deltas = OllamaDeltas(head, Usage(prepared, here.engine.block_size), is_chat, make_parser)
    return await answer(request, form, Generation(here.engine, prepared, deltas), NDJSON)


class Message:
    """How one of the two routes writes a part of an answer."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat

    def line(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """A part, which may be the whole."""
        head = {"model": self._model, "created_at": timestamp()}
        thoughts = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return head | {"response": content} | thoughts
        called = {"tool_calls": calls} if calls else {}
        return head | {"message": {"role": "assistant", "content": content} | thoughts | called}


class OllamaDeltas:
    """One answer, as lines or as a body. Calls of tools are written when they are whole; what is none is left out."""

    def __init__(self, head: ResponseHead, usage: Usage, is_chat: bool, make_parser: MakeParser) -> None:
        self.head = head
        self.usage = usage
        self._message = Message(head.model, is_chat)
        self._choice = MessageChoice(make_parser())
        self._call = ("", "")
        """Name and arguments of the call that is being written."""
        self._began_at = time.monotonic_ns()
        self._first_at: int | None = None

    def events(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> bytes:
        """A line for each part, and the last one with the counts."""
        self._first_at = self._first_at or time.monotonic_ns()
        lines = b""
        for delta in self._choice.deltas(completion):
            calls = self._calls_of(delta)
            if delta.content or delta.reasoning or calls:
                lines += _encode(self._message.line(delta.content, delta.reasoning, calls) | {"done": False}) + b"\n"
        if completion.finish_reason is not None:
            last = self._message.line("", "", []) | self._last(completion)
            lines += _encode(last) + b"\n"
        return lines

    def parts(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> Iterator[bytes]:
        """`events`, in one piece."""
        yield self.events(prompt_index, completion, output)

    def choice(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """The whole answer."""
        deltas = self._choice.deltas(completion)
        calls = [call for delta in deltas for call in self._calls_of(delta)]
        content = "".join([delta.content for delta in deltas])
        thinking = "".join([delta.reasoning for delta in deltas])
        return {"index": 0, "answer": self._message.line(content, thinking, calls) | self._last(completion)}

    def end(self) -> bytes:
        """Nothing: the last line says that it is the last."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """A line with the error."""
        return error.body(OLLAMA) + b"\n"

    def body(self, choices: list[dict[str, Any]]) -> bytes:
        """The whole answer."""
        return _encode(choices[0]["answer"])

    def _calls_of(self, delta: Delta) -> list[dict[str, Any]]:
        """The call that a delta completes, if any."""
        part = delta.tool_call
        if part is None:
            return []
        name, arguments = ("", "") if part.name is not None else self._call
        self._call = (part.name or name, arguments + part.arguments)
        if not part.complete:
            return []
        return [{"function": {"name": self._call[0], "arguments": arguments_of(self._call[1])}}]

    def _last(self, completion: CompletionOutput) -> dict[str, Any]:
        """Why it ended, and what it took, in nanoseconds. When the first token came is known of streams only."""
        at = time.monotonic_ns()
        first = self._first_at
        return {
            "done": True,
            "done_reason": DONE_REASONS.get(completion.finish_reason or "", "stop"),
            "total_duration": at - self._began_at,
            "load_duration": 0,
            "prompt_eval_count": self.usage.num_prompt_tokens,
            "prompt_eval_duration": 0 if first is None else first - self._began_at,
            "eval_count": self.usage.num_completion_tokens,
            "eval_duration": at - (self._began_at if first is None else first),
        }


@router.post(
    "/api/embed",
    response_model=None,
    openapi_extra=ANY_CONTENT_TYPE | describes(OllamaVectors, body=OllamaEmbedBody),
)
async def embed(request: Request) -> Response:
    """Make vectors of texts. Every text is checked before any runs.

    Raises RequestError, NotHereError for a model that makes something else of texts, EngineOverloadedError,
    EngineDeadError.
    """
    form, prepared, _ = await here_for_vectors(request).intake.prepare(OLLAMA_EMBED, request)
    return await respond_unless_gone(request, _embedded(request, request.scope["request_id"], prepared, form))


@router.post(
    "/api/embeddings",
    response_model=None,
    openapi_extra=ANY_CONTENT_TYPE | describes(OllamaVector, body=OllamaEmbeddingsBody),
)
async def embeddings(request: Request) -> Response:
    """Make the vector of one text, as older clients ask.

    Raises RequestError, NotHereError for a model that makes something else of texts, EngineOverloadedError,
    EngineDeadError.
    """
    form, prepared, _ = await here_for_vectors(request).intake.prepare(OLLAMA_EMBEDDINGS, request)
    return await respond_unless_gone(request, _one_embedded(request, request.scope["request_id"], prepared, form))


async def _one_embedded(request: Request, name: str, requests: list[PreparedRequest], form: AnswerForm) -> Response:
    (vector,), _ = await vectors_of(request, name, requests)
    return Response(_encode({"embedding": vector.tolist()}), headers=form.headers(), media_type="application/json")


async def _embedded(request: Request, name: str, requests: list[PreparedRequest], form: AnswerForm) -> Response:
    began_at = time.monotonic_ns()
    vectors, _ = await vectors_of(request, name, requests)
    rows = await in_slices(_encode(vector.tolist()) for vector in vectors)
    tail = {
        "total_duration": time.monotonic_ns() - began_at,
        "load_duration": 0,
        "prompt_eval_count": sum(len(item.request.prompt_token_ids) for item in requests),
    }
    return LargeJson({"model": services(request).model.name}, "embeddings", rows, tail, form.headers())


def timestamp() -> str:
    """Now, as the API gives it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
