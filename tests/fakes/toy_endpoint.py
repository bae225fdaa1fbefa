"""An endpoint as anybody may add one: this file, and a line in the table of endpoints."""

from fastapi import APIRouter, Request, Response

from pagemill.serve.http.auth import PUBLIC
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.preparer import COMPLETIONS
from pagemill.serve.http.responses import ResponseHead, Usage, now
from pagemill.serve.http.routes.completions import CompletionDeltas
from pagemill.serve.http.state import services

router = APIRouter()


@router.get("/toy/name", openapi_extra=PUBLIC)
async def name(request: Request) -> str:
    """What the model is called; no key is needed."""
    return services(request).model.name


@router.post("/toy/completions", response_model=None)
async def complete(request: Request) -> Response:
    """Completions under ids of its own, streamed or whole."""
    here = services(request)
    form, prepared, echoes = await here.intake.prepare(COMPLETIONS, request)
    head = ResponseHead("toy-1", here.model.name, now())
    usage = Usage(prepared, here.engine.block_size)
    deltas = CompletionDeltas(head, usage, form.with_usage, form.num_per_prompt, echoes)
    return await answer(request, form, Generation(here.engine, prepared, deltas))
