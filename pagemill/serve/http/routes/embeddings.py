"""/v1/embeddings."""

from fastapi import APIRouter, Request, Response

from pagemill.serve.http.state import services

router = APIRouter()


@router.post("/v1/embeddings", response_model=None)
async def create_embedding(request: Request) -> Response:
    """Make vectors of texts."""
    return await services(request).embeddings.respond(request)
