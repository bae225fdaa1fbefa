"""/v1/completions."""

from fastapi import APIRouter, Request, Response

from pagemill.serve.http.state import services

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def create_completion(request: Request) -> Response:
    """Continue texts."""
    return await services(request).completions.respond(request)
