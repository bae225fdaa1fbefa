"""/metrics, for Prometheus."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pagemill.serve.http.state import services

router = APIRouter()


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """The figures of this process's front end, in the exposition format."""
    return Response(services(request).engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)
