"""POST /generate: a prompt in, the prompt and its continuations out. The smallest of the APIs, as an example of one."""

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import ApiError
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.preparer import GENERATE
from pagemill.serve.http.responses import ResponseHead, Usage, now
from pagemill.serve.http.schemas.answers import Generated
from pagemill.serve.http.schemas.generate import GenerateBody
from pagemill.serve.http.state import services

router = APIRouter()
NDJSON = "application/x-ndjson"
_encode = msgspec.json.encode


@router.post(
    "/generate",
    response_model=None,
    openapi_extra=describes(Generated, body=GenerateBody, event=Generated, stream_type=NDJSON),
)
async def generate(request: Request) -> Response:
    """Continue a text. A stream has a line of JSON for each part, with the texts so far.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    form, prepared, echoes = await here.intake.prepare(GENERATE, request)
    head = ResponseHead(request.scope["request_id"], here.model.name, now())
    builder = TextLines(head, Usage(prepared, here.engine.block_size), echoes[0], form.num_per_prompt)
    return await answer(request, form, Generation(here.engine, prepared, builder, form.beam), NDJSON)


class TextLines:
    """One answer, as lines or as a body."""

    def __init__(self, head: ResponseHead, usage: Usage, prompt: str, num_texts: int) -> None:
        """`prompt`: what each of the texts begins with."""
        self.head = head
        self.usage = usage
        self._prompt = prompt
        self._texts = [prompt] * num_texts

    def events(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> bytes:
        """All texts so far, if one has grown."""
        if not completion.text:
            return b""
        self._texts[completion.index] += completion.text
        return _encode({"text": self._texts}) + b"\n"

    def parts(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> Iterator[bytes]:
        """`events`, in one piece."""
        yield self.events(prompt_index, completion, output)

    def choice(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """One whole text."""
        return {"index": completion.index, "text": self._prompt + completion.text}

    def end(self) -> bytes:
        """Nothing: the texts were complete."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """A line with the error."""
        return error.body() + b"\n"

    def body(self, choices: list[dict[str, Any]]) -> bytes:
        """All texts."""
        return _encode({"text": [choice["text"] for choice in choices]})
