"""What operators and benchmarks ask of a server: /server_info, /reset_prefix_cache, /pause, /resume, /is_paused and
/abort_requests. Mounted where PAGEMILL_SERVER_DEV_MODE=1 says so."""

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from pagemill import __version__
from pagemill.errors import RequestError
from pagemill.serve.http.connection import read_small
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import BusyError
from pagemill.serve.http.schemas.answers import Done, IsPaused, ServerInfo, Status
from pagemill.serve.http.schemas.operator import AbortBody
from pagemill.serve.http.state import services

router = APIRouter()
KEEP = "keep"
"""What becomes of requests in a pause."""


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


@router.post("/pause", openapi_extra=describes(Status, statuses=(415,)))
async def pause(request: Request, mode: str = KEEP) -> dict[str, str]:
    """Begin no further step in any engine: requests keep what they have, new ones wait, and clients see nothing of it
    but the time. Raises RequestError for another mode."""
    if mode != KEEP:
        raise RequestError(
            f"mode={mode[:40]!r} is not allowed: keep, with which requests go on where they are; end those that shall "
            "not with /abort_requests",
            "mode",
        )
    await services(request).engine.control.pause()
    return {"status": "paused"}


@router.post("/resume", openapi_extra=describes(Status, statuses=(415,)))
async def resume(request: Request) -> dict[str, str]:
    """Go on."""
    await services(request).engine.control.resume()
    return {"status": "resumed"}


@router.get("/is_paused", openapi_extra=describes(IsPaused))
async def is_paused(request: Request) -> dict[str, bool]:
    """Whether every engine is paused; one that was started again meanwhile is not."""
    return {"is_paused": await services(request).engine.control.is_paused()}


@router.post("/abort_requests", response_model=None, openapi_extra=describes(body=AbortBody))
async def abort_requests(request: Request) -> Response:
    """End requests of this API server, by the ids of their answers; their clients get what there is. Ids that are not
    in flight are ignored. Raises RequestError."""
    here = services(request)
    for request_id in (await read_small(request, AbortBody)).request_ids:
        await here.engine.abort(request_id)
    return Response()
