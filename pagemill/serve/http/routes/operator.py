"""What operators and benchmarks ask of a server: its settings, to pause, to drain, to forget cached prefixes, to abort
requests, to record a profile, and to call its workers. Mounted where PAGEMILL_SERVER_DEV_MODE=1 says so."""

import asyncio
import json
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from pagemill import __version__, envs
from pagemill.errors import EngineDeadError, RequestError
from pagemill.log import get_logger
from pagemill.messages.fleet import AbortOrder, DrainOrder, HaltOrder
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.connection import read_small
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import BusyError, NotHereError
from pagemill.serve.http.schemas.answers import CallResults, Done, Draining, IsPaused, ProfileFiles, ServerInfo, Status
from pagemill.serve.http.schemas.operator import AbortBody, CallBody
from pagemill.serve.http.state import services

logger = get_logger(__name__)
router = APIRouter()
MODES = ABORT, WAIT, KEEP = "abort", "wait", "keep"
"""What becomes of requests in a pause."""
PROFILE = "pagemill-profile"
"""What the names of recordings begin with."""
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


@router.post("/drain", openapi_extra=describes(Draining, statuses=(415,)))
async def drain(request: Request, undo: bool = False) -> dict[str, Any]:
    """Refuse new requests, in every API server, also in one that is started later, until the same is said with
    `undo=true`; what runs and waits is completed, and is counted in the answer."""
    here = services(request)
    here.orders.tell(DrainOrder(not undo))
    here.engine.gate.holds_off = not undo
    return {"status": "serving" if undo else "draining", "num_requests": here.engine.load().num_requests}


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


@router.post("/start_profile", openapi_extra=describes(Status, statuses=(404, 409, 415)))
async def start_profile(request: Request) -> dict[str, str]:
    """Record what the workers compute, until /stop_profile. Raises NotHereError without PAGEMILL_TORCH_PROFILER_DIR,
    BusyError where a recording cannot begin."""
    folder = envs.profiler_folder()
    if folder is None:
        raise NotHereError("start the server with PAGEMILL_TORCH_PROFILER_DIR, the folder for profiles")
    try:
        await services(request).engine.start_profile(str(folder / PROFILE))
    except EngineDeadError:
        raise
    except ValueError as error:
        logger.warning("/start_profile: %s", error)
        raise BusyError("a profile is being recorded already, or its folder is not there: see the log") from None
    return {"status": "recording"}


@router.post("/stop_profile", openapi_extra=describes(ProfileFiles, statuses=(409, 415)))
async def stop_profile(request: Request) -> dict[str, list[str]]:
    """End the recording, and write it to the folder. Raises BusyError where there is none."""
    try:
        files = await services(request).engine.stop_profile()
    except EngineDeadError:
        raise
    except ValueError as error:
        logger.warning("/stop_profile: %s", error)
        raise BusyError("no profile is being recorded, or it cannot be written: see the log") from None
    return {"files": [Path(file).name for file in files]}


@router.post("/collective_rpc", openapi_extra=describes(CallResults, body=CallBody))
async def collective_rpc(request: Request) -> dict[str, list[Any]]:
    """Call a method of all workers of an engine, by its name. Raises RequestError."""
    body = await read_small(request, CallBody)
    return {"results": await services(request).engine.collective_rpc(body.method)}
