"""/v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from pagemill.serve.http.state import services

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation."""
    return await services(request).chat.respond(request)
