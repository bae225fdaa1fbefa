"""/health, /health/live, /health/ready, /ping, /version, /load."""

import re
from typing import Any

from fastapi import APIRouter, Request, Response

from pagemill import __version__
from pagemill.errors import UnavailableError
from pagemill.serve.http.auth import PUBLIC
from pagemill.serve.http.described import describes
from pagemill.serve.http.schemas.answers import ServerLoad, Version
from pagemill.serve.http.state import services

router = APIRouter()

_RESTARTS = r"is down: (?:its node cannot be reached|it is being restarted(?:, \d+ attempts in a row failed)?)"
_PUBLIC = re.compile(rf"the server is shutting down|engine \d+ (?:{_RESTARTS}|[a-z ]+)")


@router.get("/health", response_model=None, openapi_extra=PUBLIC | describes())
@router.get("/ping", response_model=None, openapi_extra=PUBLIC | describes())
async def health(request: Request) -> Response:
    """200 while every engine lives and makes progress; else 503 with the reason. Asks nobody: it answers from what is
    known, and queues nothing. Raises UnavailableError."""
    problem = services(request).engine.problem()
    if problem is not None:
        raise UnavailableError(_public(problem))
    return Response()


@router.get("/health/live", response_model=None, openapi_extra=PUBLIC | describes())
async def live() -> Response:
    """200 as long as this process answers at all; engines are restarted without it."""
    return Response()


@router.get("/health/ready", response_model=None, openapi_extra=PUBLIC | describes())
async def ready(request: Request) -> Response:
    """200 while a new request would be worked on now. Raises UnavailableError, which is 503, otherwise."""
    engine = services(request).engine
    if not engine.accepts():
        raise UnavailableError(_public(engine.problem() or "the server is shutting down"))
    return Response()


def _public(problem: str) -> str:
    """What anybody may know of it: what is wrong with which engine. Why is in the log, with paths and tracebacks."""
    first_line = problem.partition("\n")[0]
    parts = [_PUBLIC.match(part.strip()) for part in first_line.split(";")]
    return "; ".join(part[0] for part in parts if part is not None) or "the engine is not running"


@router.get("/load", openapi_extra=describes(ServerLoad))
async def load(request: Request) -> dict[str, int]:
    """How many completions run and wait, in all API servers together."""
    return {"server_load": services(request).engine.load().num_requests}


@router.get("/version", openapi_extra=describes(Version))
async def version() -> dict[str, Any]:
    """The version of pagemill."""
    return {"version": __version__}
