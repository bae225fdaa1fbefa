"""/health, /ping, /version."""

from typing import Any

from fastapi import APIRouter, Request, Response

from pagemill import __version__
from pagemill.serve.http.state import services

router = APIRouter()


@router.get("/health", response_model=None)
@router.get("/ping", response_model=None)
async def health(request: Request) -> Response:
    """200 while the engine lives. Raises EngineDeadError, which is 503."""
    engine = services(request).engine
    if engine.errored:
        raise engine.dead_error
    return Response()


@router.get("/version")
async def version() -> dict[str, Any]:
    """The version of pagemill."""
    return {"version": __version__}
