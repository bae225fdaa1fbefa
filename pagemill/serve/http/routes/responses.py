"""POST /v1/responses: OpenAI's Responses API."""

import functools
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.errors import RequestError
from pagemill.serve.http.described import describes
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.intake import PreparedBody
from pagemill.serve.http.preparer import RESPONSES
from pagemill.serve.http.response_deltas import ResponseDeltas
from pagemill.serve.http.responses import ResponseHead, Usage, now
from pagemill.serve.http.schemas.answers import ResponseEvent, ResponseObject
from pagemill.serve.http.schemas.response_items import new_id
from pagemill.serve.http.schemas.responses import ResponseForm, ResponsesBody
from pagemill.serve.http.state import services

router = APIRouter()


@router.post(
    "/v1/responses",
    response_model=None,
    openapi_extra=describes(ResponseObject, body=ResponsesBody, event=ResponseEvent),
)
async def create_response(request: Request) -> Response:
    """Answer items. Everything is checked before anything runs.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    body = await here.intake.prepare(RESPONSES, request)
    form = body.form
    if form.response is None:
        raise TypeError("a body of another kind")
    _check_kept(form.response)
    head = ResponseHead(new_id("resp"), here.model.name, now())
    make_parser = functools.partial(here.parsers.make, form.message)
    usage = Usage(body.requests, here.engine.block_size)
    deltas = ResponseDeltas(head, usage, make_parser, _fields(body, form.response), form.tokens)
    return await answer(request, form, Generation(here.engine, body.requests, deltas))


def _check_kept(form: ResponseForm) -> None:
    """Raises RequestError where the answer is to be kept."""
    for name, asked in {"store": form.store, "background": form.background}.items():
        if asked:
            raise RequestError(f"{name}=true is not supported by this server: nothing is stored", name)


def _fields(body: PreparedBody, form: ResponseForm) -> dict[str, Any]:
    """What the answer says of the request, and of how it is sampled."""
    params = body.requests[0].request.params
    sampled = {name: getattr(params, name, None) for name in ("temperature", "top_p")}
    fields: dict[str, Any] = msgspec.json.decode(form.fields)
    return fields | sampled | {"store": False, "background": False, "service_tier": "default"}
