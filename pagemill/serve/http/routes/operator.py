"""What operators and benchmarks ask of a server: /server_info, /reset_prefix_cache, /pause, /resume, /is_paused and
/abort_requests. Mounted where PAGEMILL_SERVER_DEV_MODE=1 says so."""

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request, Response

from pagemill import __version__
from pagemill.errors import RequestError
from pagemill.messages.fleet import AbortOrder, HaltOrder
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.connection import read_small
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import BusyError
from pagemill.serve.http.schemas.answers import Done, IsPaused, ServerInfo, Status
from pagemill.serve.http.schemas.operator import AbortBody
from pagemill.serve.http.state import services

router = APIRouter()
MODES = ABORT, WAIT, KEEP = "abort", "wait", "keep"
"""What becomes of requests in a pause."""
RESET_TRIES = 200
RESET_POLL_S = 0.05


@router.get("/server_info", openapi_extra=describes(ServerInfo))
async def server_info(request: Request) -> dict[str, Any]:
    """The settings that the server runs with, but for keys."""
    here = services(request)
    return {"version": __version__, "model": here.model.name, "config": json.loads(json.dumps(here.info, default=str))}


@router.post("/reset_prefix_cache", openapi_extra=describes(Done, statuses=(409, 415)))
async def reset_prefix_cache(request: Request) -> dict[str, bool]:
    """Forget cached prefixes, in every engine. Raises BusyError while one has requests, whose blocks are in use."""
    if not await services(request).engine.reset_prefix_cache():
        raise BusyError("the prefix cache is in use by requests that run: try again when they have ended")
    return {"success": True}


@router.post("/pause", openapi_extra=describes(Status, statuses=(409, 415)))
async def pause(request: Request, mode: str = ABORT, clear_cache: bool = True) -> dict[str, str]:
    """Let new requests wait until /resume, in every engine, also in one that is started meanwhile. Those in flight end
    at once with what there is (abort), are completed first (wait), or stay where they are (keep). Unless they stay,
    cached prefixes are forgotten (clear_cache).

    Raises RequestError for another mode.
    """
    if mode not in MODES:
        raise RequestError(f"mode={mode[:40]!r} is not one of {', '.join(MODES)}", "mode")
    here = services(request)
    if mode == WAIT:
        here.orders.tell(HaltOrder("hold"))
        await here.engine.control.finish()
    here.orders.tell(HaltOrder("pause"))
    await here.engine.control.pause()
    if mode == ABORT:
        here.orders.tell(AbortOrder(None))
        await here.engine.abort(None)
    if mode != KEEP and clear_cache:
        await _forget_prefixes(here.engine)
    return {"status": "paused"}


async def _forget_prefixes(engine: AsyncLLM) -> None:
    """Once the last request has given its blocks back: other API servers end theirs meanwhile. Raises BusyError."""
    for _ in range(RESET_TRIES):
        if await engine.reset_prefix_cache():
            return
        await asyncio.sleep(RESET_POLL_S)
    raise BusyError("the engines are paused, but the prefix cache is still in use: try /reset_prefix_cache")


@router.post("/resume", openapi_extra=describes(Status, statuses=(415,)))
async def resume(request: Request) -> dict[str, str]:
    """Go on."""
    services(request).orders.tell(HaltOrder("resume"))
    await services(request).engine.control.resume()
    return {"status": "resumed"}


@router.get("/is_paused", openapi_extra=describes(IsPaused))
async def is_paused(request: Request) -> dict[str, bool]:
    """Whether every engine is paused."""
    return {"is_paused": await services(request).engine.control.is_paused()}


@router.post("/abort_requests", response_model=None, openapi_extra=describes(body=AbortBody))
async def abort_requests(request: Request) -> Response:
    """End requests, by the ids of their answers, whichever API server has them; their clients get what there is. Ids
    that are not in flight are ignored. Raises RequestError."""
    here = services(request)
    request_ids = (await read_small(request, AbortBody)).request_ids
    here.orders.tell(AbortOrder(request_ids))
    await here.engine.abort(request_ids)
    return Response()
