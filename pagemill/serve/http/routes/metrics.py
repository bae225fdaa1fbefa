"""/metrics, for Prometheus."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pagemill.serve.http.auth import METRICS, PUBLIC
from pagemill.serve.http.described import describes
from pagemill.serve.http.state import services

router = APIRouter()


@router.get(
    "/metrics",
    response_model=None,
    openapi_extra=PUBLIC | METRICS | describes(str, media_type="text/plain", statuses=(401,)),
)
async def metrics(request: Request) -> Response:
    """The figures of this server, however many processes answer for it, in the exposition format."""
    here = services(request)
    shared = here.shared_metrics
    text = here.engine.metrics.text() if shared is None else await shared.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
