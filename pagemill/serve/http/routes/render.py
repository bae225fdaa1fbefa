"""POST /v1/chat/completions/render and /v1/completions/render: what a body would be run with, and nothing is run."""

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.serve.http.described import describes
from pagemill.serve.http.intake import PreparedBody
from pagemill.serve.http.preparer import CHAT, COMPLETIONS
from pagemill.serve.http.schemas.answers import Rendered
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.http.state import services
from pagemill.utils.pacer import in_slices

router = APIRouter()
_encode = msgspec.json.encode


@router.post("/v1/chat/completions/render", response_model=None, openapi_extra=describes(Rendered, body=ChatBody))
async def render_chat(request: Request) -> Response:
    """The tokens and sampling parameters of a chat. Raises what the chat itself would, before it runs."""
    body = await services(request).intake.prepare(CHAT, request)
    return _answer(body, _encode(next(_rendered(request, body))))


@router.post(
    "/v1/completions/render",
    response_model=None,
    openapi_extra=describes(list[Rendered], body=CompletionBody),
)
async def render_completion(request: Request) -> Response:
    """A list of the same, for each prompt of a completion."""
    body = await services(request).intake.prepare(COMPLETIONS, request)
    rows = await in_slices(map(_encode, _rendered(request, body)))
    return _answer(body, b"[" + b",".join(rows) + b"]")


def _rendered(request: Request, body: PreparedBody) -> Iterator[dict[str, Any]]:
    here = services(request)
    for prepared in body.requests:
        yield {
            "request_id": request.scope["request_id"],
            "model": here.model.name,
            "token_ids": prepared.request.prompt_token_ids,
            "sampling_params": _settings(prepared.request.params),
            "stream": body.form.stream,
            "priority": prepared.request.priority,
        }


def _settings(params: Any) -> dict[str, Any]:
    """Those that differ from their defaults."""
    fields: dict[str, Any] = msgspec.to_builtins(params)
    return {name: value for name, value in fields.items() if name != "type"}


def _answer(body: PreparedBody, content: bytes) -> Response:
    return Response(content, headers=body.form.headers(), media_type="application/json")
